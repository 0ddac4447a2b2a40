"""What kind of word a token is part of: the classes of the atlas. Knows texts, nothing of traces."""

from __future__ import annotations

import re
from typing import Literal, get_args

Class = Literal["name", "number", "function word", "word", "word piece", "code", "punctuation", "space", "special"]
CLASSES: tuple[Class, ...] = get_args(Class)

_CODE = re.compile(r"[_{}()\[\]<>=;/\\*&|#$@^~`+%]|[a-z][A-Z]|->|::")
# English, and German for the traffic that drifts there. Words that carry grammar rather than matter.
_FUNCTION_WORDS = """
a an the this that these those it its he she they we you i me him her them us my your his our their who which what and
or but if then else so because as while of in on at by for from to with without into over under about than not no nor
is are was were be been being am do does did have has had can could will would shall should may might must there here
when where how why all any each some such both more most other
der die das den dem des ein eine einen einem einer eines und oder aber wenn dann als wie ist sind war waren sein hat
haben wird werden kann nicht kein keine mit von zu zum zur im auf am für aus bei nach über unter vor durch es er sie wir
ihr ich sich auch nur noch man dass
"""
_FUNCTION = frozenset(_FUNCTION_WORDS.split())


def class_of(text: str, *, special: bool = False) -> Class:
    """`text` is the token as it is written, leading space included (that is what tells a word from its piece)."""
    if special:
        return "special"
    bare = text.strip()
    if not bare:
        return "space"
    if _CODE.search(bare):
        return "code"
    if any(character.isdigit() for character in bare):
        return "number"
    if not any(character.isalpha() for character in bare):
        return "punctuation"
    if bare.lower() in _FUNCTION:
        return "function word"
    if bare[0].isupper():
        return "name"
    return "word" if text[0].isspace() else "word piece"
