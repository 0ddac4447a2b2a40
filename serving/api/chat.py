"""Text to token ids: a prompt as it stands, a conversation through the model's own chat template.

What the template refuses (an unknown role order, say) is the client's to mend, so it becomes a RequestError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.api.schema import Message
from shared.errors import RequestError


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a plain prompt, with the special tokens that the tokenizer itself puts around a text."""
    return list(tokenizer(text)["input_ids"])


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of the conversation and of the opening of the assistant's turn. Raises RequestError."""
    import jinja2

    if not tokenizer.chat_template:
        raise RequestError(
            "This model has no chat template. Use /v1/completions.", param="messages", code="no_chat_template"
        )
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in messages
    ]
    try:
        encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
    return list(encoded["input_ids"])
