"""Bodies that must be refused: what is added to the smallest valid one, the parameter that is blamed, the code."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.api.conftest import MODEL, VOCABULARY

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "x"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
UNSUPPORTED, UNKNOWN, TYPE, VALUE = "unsupported_parameter", "unknown_parameter", "invalid_type", "invalid_value"

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# What is added to the smallest valid completion, the parameter blamed, the code.
COMPLETION_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "logprobs", VALUE),
    ({"logprobs": True}, "logprobs", TYPE),
    ({"prompt_logprobs": -1}, "prompt_logprobs", VALUE),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", VALUE),
    ({"echo": 1}, "echo", TYPE),
    ({"echo": True, "logprobs": 0, "stream": True}, "echo", VALUE),  # the prompt's come at the end
    ({"suffix": "end"}, "suffix", UNSUPPORTED),
    ({"best_of": 0}, "best_of", VALUE),
    ({"best_of": 1, "n": 2}, "best_of", VALUE),
    ({"best_of": 2, "stream": True}, "best_of", VALUE),
    ({"best_of": 9}, "best_of", VALUE),  # more than the queue holds
    ({"n": 0}, "n", VALUE),
    ({"n": 9}, "n", VALUE),
    ({"n": 3, "prompt": ["a", "b", "c"]}, "n", VALUE),
    ({"n": True}, "n", TYPE),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", VALUE),
    ({"logit_bias": {"five": 1}}, "logit_bias.five", VALUE),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", VALUE),
    ({"logit_bias": [5]}, "logit_bias", TYPE),
    ({"presence_penalty": 2.5}, "presence_penalty", VALUE),
    ({"frequency_penalty": "high"}, "frequency_penalty", TYPE),
    ({"repetition_penalty": 0}, "repetition_penalty", VALUE),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", VALUE),
    ({"min_tokens": -1}, "min_tokens", VALUE),
    ({"min_tokens": 17}, "min_tokens", VALUE),  # more than max_tokens, which is 16 when left out
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", VALUE),
    ({"stop_token_ids": 5}, "stop_token_ids", TYPE),
    ({"return_token_ids": "yes"}, "return_token_ids", TYPE),
    ({"priority": 101}, "priority", VALUE),
    ({"priority": 0.5}, "priority", TYPE),
    ({"timeout": 0}, "timeout", VALUE),
    ({"timeout": "1s"}, "timeout", TYPE),
    ({"structured_outputs": {}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", VALUE),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", TYPE),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", VALUE),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend", UNKNOWN),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        VALUE,
    ),
    ({"tools": []}, "tools", UNKNOWN),  # a field of chat
    ({"messages": []}, "messages", UNKNOWN),
    ({"max_completion_tokens": 5}, "max_completion_tokens", UNKNOWN),
    ({"temprature": 0.5}, "temprature", UNKNOWN),
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": None}, "model", TYPE),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": [""]}, "prompt", "empty_prompt"),
    ({"prompt": ["x", ""]}, "prompt", "empty_prompt"),
    ({"prompt": [[]]}, "prompt", "empty_prompt"),
    ({"prompt": None}, "prompt", TYPE),
    ({"prompt": 5}, "prompt", TYPE),
    ({"prompt": {"text": "x"}}, "prompt", TYPE),
    ({"prompt": [True]}, "prompt", TYPE),
    ({"prompt": ["x", 5]}, "prompt[1]", TYPE),
    ({"prompt": [5, "x"]}, "prompt[1]", TYPE),
    ({"prompt": [[5], ["x"]]}, "prompt[1][0]", TYPE),
    ({"prompt": [-1]}, "prompt[0]", VALUE),
    ({"prompt": [VOCABULARY]}, "prompt", VALUE),
    ({"prompt": ["x"] * 9}, "prompt", VALUE),  # more than the queue holds
    ({"prompt": "\ud800"}, "prompt", VALUE),
    ({"model": "\ud800"}, "model", "model_not_found"),
    ({"stop": "\udfff"}, "stop", VALUE),
    ({"(strange)": 1}, "(strange)", UNKNOWN),
    ({"prompt": "x" * 300}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": 1.5}, "max_tokens", TYPE),
    ({"max_tokens": "5"}, "max_tokens", TYPE),
    ({"max_tokens": True}, "max_tokens", TYPE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": -0.1}, "temperature", VALUE),
    ({"temperature": "hot"}, "temperature", TYPE),
    ({"temperature": float("nan")}, "temperature", VALUE),
    ({"temperature": float("inf")}, "temperature", VALUE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_p": 1.1}, "top_p", VALUE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"min_p": 1.5}, "min_p", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"seed": "1"}, "seed", TYPE),
    ({"stop": ""}, "stop", VALUE),
    ({"stop": 5}, "stop", TYPE),
    ({"stop": ["a", 5]}, "stop[1]", TYPE),
    ({"stop": ["a", ""]}, "stop[1]", VALUE),
    ({"stop": [str(number) for number in range(17)]}, "stop", VALUE),
    ({"stream": "yes"}, "stream", TYPE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", UNKNOWN),
    ({"stream": True, "stream_options": True}, "stream_options", TYPE),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    ({"speculative": "no"}, "speculative", TYPE),
    ({"ignore_eos": 1}, "ignore_eos", TYPE),
    ({"user": 5}, "user", TYPE),
    ({"metadata": {"domain": 5}}, "metadata.domain", TYPE),
    ({"metadata": {"domain": ""}}, "metadata.domain", VALUE),
    ({"metadata": {"domain": "a|b=c"}}, "metadata.domain", VALUE),
    ({"metadata": {"domain": "sql\n"}}, "metadata.domain", VALUE),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", VALUE),
    ({"metadata": ["sql"]}, "metadata", TYPE),
]
CHAT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 1}, "logprobs", TYPE),
    ({"top_logprobs": 3}, "top_logprobs", VALUE),  # without logprobs
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", VALUE),
    ({"best_of": 1}, "best_of", UNKNOWN),  # a field of completions
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", VALUE),
    ({"tools": [TOOL, TOOL]}, "tools", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "two words"}}]}, "tools[0].function.name", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, "tools", VALUE),  # nothing would hold it
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"tools": [TOOL]}, "tools", "tools_not_supported"),  # the template writes none
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "some", "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice", TYPE),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice.type", VALUE),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": "json"}, "response_format", TYPE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"modalities": ["audio"]}, "modalities", UNSUPPORTED),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"service_tier": "flex"}, "service_tier", UNSUPPORTED),
    ({"safety_identifier": "x"}, "safety_identifier", UNSUPPORTED),
    ({"echo": False}, "echo", UNKNOWN),  # a field of completions
    ({"prompt": "x"}, "prompt", UNKNOWN),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", VALUE),
    ({"max_completion_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"messages": []}, "messages", VALUE),
    ({"messages": "hello"}, "messages", TYPE),
    ({"messages": ["hello"]}, "messages[0]", TYPE),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", TYPE),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", VALUE),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "Bo"}]},
        "messages[1].name",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight", UNKNOWN),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].type",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "5"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        VALUE,
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "tools_not_supported"),
]

# JSON can escape half of a surrogate pair, which is no text; and a name may look like something else in a path.
HALF, SHOWN = "\ud800", "\\ud800"
SCHEMA_OF: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": HALF}}}
STRANGE_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({HALF: 1}, SHOWN, UNKNOWN),
    ({f"a{HALF}": HALF}, f"a{SHOWN}", UNKNOWN),
    ({"zzz": HALF}, "zzz", UNKNOWN),
    ({"": 1}, "", UNKNOWN),
    ({"model": HALF}, "model", "model_not_found"),
    ({"prompt": ["a", HALF]}, "prompt[1]", VALUE),
    ({"stop": HALF}, "stop", VALUE),
    ({"user": HALF}, "user", VALUE),
    ({"temperature": HALF}, "temperature", TYPE),
    ({"suffix": HALF}, "suffix", UNSUPPORTED),
    ({"metadata": {HALF: "a"}}, f"metadata.{SHOWN}", VALUE),
    ({"metadata": {"a": HALF}}, "metadata.a", VALUE),
    ({"logit_bias": {HALF: 1}}, f"logit_bias.{SHOWN}", VALUE),
    ({"logit_bias": {"(x)": 1}}, "logit_bias.(x)", VALUE),
    ({"stream": True, "stream_options": {HALF: 1}}, f"stream_options.{SHOWN}", UNKNOWN),
    ({"stream": True, "stream_options": {"(x)": 1}}, "stream_options.(x)", UNKNOWN),
    ({"structured_outputs": {"regex": HALF}}, "structured_outputs.regex", VALUE),
    ({"structured_outputs": {"json": {HALF: 1}}}, "structured_outputs.json", VALUE),
    ({"structured_outputs": {"json": json.dumps({"const": HALF})}}, "structured_outputs.json", VALUE),
]
STRANGE_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": HALF, "content": "x"}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": "x", HALF: 1}]}, f"messages[0].{SHOWN}", UNKNOWN),
    ({"messages": [{"role": "user", "content": "x", "(user)": 1}]}, "messages[0].(user)", UNKNOWN),
    ({"response_format": {"type": HALF}}, "response_format.type", VALUE),
    ({"response_format": SCHEMA_OF}, "response_format.json_schema.schema", VALUE),
    ({"tools": [{**TOOL, "function": {"name": HALF}}]}, "tools[0].function.name", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {HALF: 1}}}]}, "tools[0].function.parameters", VALUE),
    ({"tools": [TOOL], "tool_choice": HALF}, "tool_choice", VALUE),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": json.dumps({"a": HALF})}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        VALUE,
    ),
]
