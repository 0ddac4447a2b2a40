"""An order is followed once, by whoever takes it, while somebody waits for it; and whoever gave it hears why not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shared.errors import Declined, ServiceDown
from shared.orders import Order
from shared.store import Store


def following(store: Store, follow: Callable[[Order], object], *, done: bool = True) -> threading.Thread:
    """A learner that follows one order."""

    def obey() -> None:
        while (order := store.orders.take()) is None:
            pass
        store.orders.answer(order, follow(order), done=done)

    thread = threading.Thread(target=obey, daemon=True)
    thread.start()
    return thread


def test_the_answer_comes_back(store: Store) -> None:
    thread = following(store, lambda order: {"did": order.name, **order.arguments})
    assert store.orders.ask("pin", reason="a drill") == {"did": "pin", "reason": "a drill"}
    thread.join(10)
    assert store.orders.take() is None, "once"


def test_a_refusal_is_heard_with_its_reason(store: Store) -> None:
    following(store, lambda _: "v3 is pinned", done=False)
    with pytest.raises(Declined, match="v3 is pinned"):
        store.orders.ask("rollback")


def test_an_order_that_nobody_waits_for_any_more_is_not_followed(store: Store) -> None:
    with pytest.raises(ServiceDown, match="has not answered `promote`"):
        store.orders.ask("promote", wait_s=0.05, version="v1")
    assert store.orders.take() is None
