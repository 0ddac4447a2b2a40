"""A worker process's side: one JSON object a line in and out.

It computes while it is asked something and blocks on its input otherwise; it ends when its input does. While it works
it may say how far it is. The other side is `ops.task_process`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import RedraftError

Tell = Callable[[Mapping[str, Any]], None]
TOLD = "told"  # key of a line that is no answer yet


def answer_tasks(do: Callable[[Mapping[str, Any], Tell], Mapping[str, Any]]) -> None:
    """Until the input ends. What `do` raises is the answer to its task."""
    # Whatever a library prints must not come between our lines.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(facts: Mapping[str, Any]) -> None:
        print(json.dumps({TOLD: facts}), file=answers, flush=True)

    for line in sys.stdin:
        try:
            answer = do(json.loads(line), tell)
        except RedraftError as error:
            answer = {"error": str(error)}
        except Exception as error:  # of a library, or a defect: the log has the rest
            sys.excepthook(*sys.exc_info())
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
