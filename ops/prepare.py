"""What takes long or can be refused before a stack starts, in a process of its own: `python -m ops.prepare FILE`.

Converts or fetches the models (with a progress bar on the terminal) and checks device and weight format, so that a
wrong setting is one line from the command and not a replica that dies again and again. A process of its own, because
the parent needs neither torch nor the memory of a conversion.
"""

from __future__ import annotations

import json
import subprocess
import sys

from shared.config import Config, config_from_dict
from shared.errors import RedraftError

_REFUSED = 2


class Preparation:
    """The running process; it goes on while other parts of the stack start."""

    def __init__(self, config: Config) -> None:
        # Standard error is the terminal's: that is where the progress bar belongs. Its Ctrl-C is the parent's, which
        # ends this process without a traceback.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ops.prepare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(config.to_dict()))
        self._process.stdin.close()

    def wait(self) -> None:
        """Raises RedraftError with the reason of a refusal."""
        assert self._process.stdout is not None
        said = self._process.stdout.read().strip()
        if self._process.wait() != 0:
            raise RedraftError(said or f"preparing the models ended with exit code {self._process.returncode}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def prepare(config: Config) -> None:
    """Raises ConfigError for a target or a drafting model that cannot be served as asked."""
    from shared.models.target import resolve_device, resolve_model, resolve_weights

    resolve_weights(config.target.dtype, resolve_device(config.target.device))
    resolve_model(config.target.model, config.home_path)
    if config.drafter.kind == "model":
        resolve_model(config.drafter.model, config.home_path, field="drafter.model")


def main() -> None:
    try:
        prepare(config_from_dict(json.load(sys.stdin)))
    except RedraftError as error:
        print(error)
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
