"""Erases one tenant: its traces and features, and every version that has learnt from them.

Requests for it wait in Redis until a learner has obeyed. Each step can be repeated, and the request is answered last,
so that a kill in between only makes it begin again. What left a replica before the request and arrives after it is
dropped at the door. MLflow may be away: what is still to be deleted there is kept on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.bank import DrafterBank
from learner.buffer import Buffer
from learner.consumer import Consumer
from learner.database import Database
from learner.journal import Journal
from learner.lineage import blob_learnt_from
from learner.release import Releases
from learner.rollout import Rollout
from learner.shelf import Shelf
from shared.errors import ConfigError
from shared.store import Store

_IN_MLFLOW = "erasures_in_mlflow"  # tenant -> receipt

log = logging.getLogger(__name__)


@dataclass
class Erasure:
    """Belongs to the loop's thread, as the database does. `folder` holds the buffers of all targets and bases."""

    database: Database
    buffer: Buffer
    consumer: Consumer
    shelf: Shelf
    rollout: Rollout
    releases: Releases
    bank: DrafterBank
    journal: Journal
    store: Store
    folder: Path

    def start(self) -> None:
        """Goes on with what an earlier life had not told MLflow."""
        for tenant in self._in_mlflow():
            self.journal.erase(tenant)

    def obey(self) -> list[str]:
        """Erases whom it is asked to; returns their names. Raises ServiceDown, and then is asked again."""
        for tenant in self.journal.erased():
            waiting = self._in_mlflow()
            receipt = waiting.pop(tenant, None)
            self.database.keep_state(_IN_MLFLOW, waiting)
            if receipt is not None:
                self.store.answer_erasure(tenant, receipt | {"mlflow": "erased"})
        erased = []
        for tenant, asked_at in self.store.erasures_asked().items():
            self.store.answer_erasure(tenant, self._erase(tenant, asked_at))
            erased.append(tenant)
        return erased

    def _erase(self, tenant: str, asked_at: float) -> dict[str, Any]:
        log.warning("erasing the tenant %s", tenant)
        self.consumer.forget(tenant)
        with self.database.transaction():
            records = self.buffer.erase(tenant, asked_at)
            tainted = self.shelf.learnt_from(tenant)
            champion = self.rollout.withdraw(tainted)
        self.releases.end_overtaken()
        self.bank.forget(tainted)
        self.rollout.reconcile()
        self._erase_blobs(tenant)
        self.store.sweep_traces(time.time(), tenant)
        records += self._erase_elsewhere(tenant)
        compact = self.database.compact()
        receipt = {
            "asked_at": asked_at,
            "done_at": time.time(),
            "records": records,
            "versions": tainted,
            "champion": champion.version,
            "disk": "overwritten"
            if compact
            else "free pages still hold deleted rows: the file is read, or the disk is full",
            "mlflow": "none" if not self.journal.records else "waits",
        }
        if self.journal.records:
            self.database.keep_state(_IN_MLFLOW, {**self._in_mlflow(), tenant: receipt})
            self.journal.erase(tenant)
        return receipt

    def _erase_blobs(self, tenant: str) -> None:
        tainted = []
        for digest in self.store.blobs():
            blob = self.store.get_blob(digest)
            if blob is None or blob_learnt_from(blob, tenant):
                tainted.append(digest)
        self.store.erase_blobs(tainted)

    def _erase_elsewhere(self, tenant: str) -> int:
        """Buffers of other targets and bases; a file whose rows cannot be told apart goes whole."""
        records = 0
        for path in self._others():
            try:
                database = Database(path)
            except ConfigError as error:
                log.warning("%s cannot be searched (%s): it is removed", path, error)
                _remove(path)
                continue
            with database.transaction():
                records += Buffer(database, recent=1, reservoir=0).erase(tenant, time.time())
                database.erase_versions(lambda blob: blob_learnt_from(blob, tenant))
            database.compact()
            database.close()
        for path in self.folder.rglob("*.broken-*"):
            log.warning("%s was set aside as broken, and may hold anything: it is removed", path)
            path.unlink(missing_ok=True)
        return records

    def _others(self) -> Iterator[Path]:
        mine = self.database.path.resolve()
        return (path for path in sorted(self.folder.rglob("*.sqlite")) if path.resolve() != mine)

    def _in_mlflow(self) -> dict[str, Any]:
        return dict(self.database.state(_IN_MLFLOW) or {})


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
