"""What an answer must look like: response formats, structured outputs, and the tools that may be called.

`response_format` is OpenAI's. `structured_outputs` is vLLM's object, of which exactly one of `json`, `json_object`,
`regex`, `choice` and `grammar` (Lark, in llguidance's dialect) is taken; its tuning options (whitespace patterns,
backends) are not known here and are refused. A JSON Schema is held to whether or not it says `strict`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from serving.api.fields import Schema, Strict, Text, by_kind, choose
from shared.errors import RequestError

NAME = "^[A-Za-z0-9_-]{1,64}$"


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")]
    | Annotated[JsonObjectFormat, Tag("(json_object)")]
    | Annotated[JsonSchemaFormat, Tag("(json_schema)")],
    by_kind("type", "text", "json_object", "json_schema"),
]


JsonSchema = Annotated[
    Annotated[Schema, Tag("(object)")] | Annotated[Text, Tag("(text)")],
    Discriminator(
        choose({dict: "(object)", str: "(text)"}),
        custom_error_type="schema_type",
        custom_error_message="must be a JSON Schema: an object, or one as text",
    ),
]


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_: JsonSchema | None = Field(default=None, alias="json", description="A JSON Schema, as an object or as text")
    json_object: Literal[True] | None = None
    # A literal of a hundred thousand letters would hold up a step, and everybody in it, for seconds.
    regex: Annotated[Text, Field(min_length=1, max_length=10_000)] | None = None
    choice: (
        Annotated[list[Annotated[Text, Field(min_length=1, max_length=2_000)]], Field(min_length=1, max_length=256)]
        | None
    ) = None
    grammar: Annotated[Text, Field(min_length=1, max_length=10_000, description="Lark")] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [value for value in (self.json_, self.json_object, self.regex, self.choice, self.grammar) if value]
        if len(given) != 1:
            raise RequestError(
                "'structured_outputs' takes exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'.",
                param="structured_outputs",
            )
        return self


class FunctionTool(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    description: Text | None = None
    parameters: Schema | None = Field(default=None, description="JSON Schema of the arguments; left out: any object")
    strict: bool | None = Field(
        default=None, description="true needs a tool_choice that forces a call: then the schema always holds"
    )


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Strict):
    name: Annotated[str, Field(pattern=NAME)]


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")] | Annotated[NamedChoice, Tag("(function)")],
    Discriminator(
        choose({str: "(word)", dict: "(function)", NamedChoice: "(function)"}),
        custom_error_type="tool_choice_type",
        custom_error_message='must be "none", "auto", "required" or an object that names a function',
    ),
]
