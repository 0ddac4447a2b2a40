"""A script for the tests of the whole stack: `redraft up`, and a socket by which its learner's actor can be asked.

Ray lets in only whoever has the token that the stack made for itself, so the orders have to come from this process.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Listener
from typing import Any

from ops import cli


def obey(path: str) -> None:
    """One order after the other: (method of the learner, arguments) in, (whether it worked, answer or error) out."""
    with Listener(path, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                try:
                    connection.send((True, _call(*connection.recv())))
                except EOFError:
                    continue
                except Exception as error:
                    connection.send((False, str(error)))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    import ray  # after the stack has set what it reads from the environment

    from learner.app import ACTOR, NAMESPACE

    learner = ray.get_actor(ACTOR, namespace=NAMESPACE)
    return ray.get(getattr(learner, method).remote(*arguments), timeout=90)


if __name__ == "__main__":
    threading.Thread(target=obey, args=(sys.argv[1],), daemon=True).start()
    cli.main(["up", *sys.argv[2:]])
