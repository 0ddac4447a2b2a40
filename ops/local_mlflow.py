"""The MLflow of the local stack: a given tracking URI, else a tracking server on SQLite under the home folder.

One worker and no job execution: the defaults would start four web workers and seven job workers for an audience of
one. Host names are matched exactly by the server's own guard, port included, so both names of the loopback are given.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from ops.ports import free_port
from ops.processes import Supervisor
from shared.config import Config

START_S = 90.0  # it imports for several seconds, and migrates its database the first time

_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",
    # A tracking URI meant for clients must not make the server its own client.
    "MLFLOW_TRACKING_URI": "",
}


def start_mlflow(supervisor: Supervisor, config: Config) -> str:
    """The tracking URI of an MLflow that answers. Raises ServiceDown with the end of its log."""
    if config.mlflow.tracking_uri:
        return config.mlflow.tracking_uri
    folder = config.home_path / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", "1", "--uvicorn-opts", "--log-level warning"),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
        *("--allowed-hosts", f"127.0.0.1:{port},localhost:{port}"),
    ]
    url = f"http://127.0.0.1:{port}"
    supervisor.start("mlflow", command, ready=lambda: answers(url), timeout_s=START_S, environment=_ENVIRONMENT)
    return url


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
