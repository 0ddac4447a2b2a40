"""A ready-made redactor: `privacy.redactor: serving.presidio:spans`, Microsoft Presidio's recognisers for English.

Needs the extra `redraft[privacy]`. Patterns (mail addresses, telephone, card, account and identity numbers, IP
addresses) are found without a model; names and places only where a spaCy model is installed. Nothing is downloaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

LANGUAGE = "en"
MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")  # the first that is installed
THRESHOLD = 0.35  # of Presidio's score; below lie patterns without any context that speaks for them
CHUNK, OVERLAP = 20_000, 400  # characters: spaCy's memory grows with a text, and no span is longer than the overlap


def spans(text: str) -> list[tuple[int, int]]:
    """Private spans of `text`, in characters."""
    analyzer, found = _analyzer(), []
    for first in range(0, max(len(text), 1), CHUNK - OVERLAP):
        for result in analyzer.analyze(text[first : first + CHUNK], language=LANGUAGE, score_threshold=THRESHOLD):
            found.append((first + result.start, first + result.end))
    return found


@cache
def _analyzer() -> Any:
    import spacy
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import SpacyNlpEngine

    installed = next((name for name in MODELS if spacy.util.is_package(name)), "")
    engine = SpacyNlpEngine(models=[{"lang_code": LANGUAGE, "model_name": installed or MODELS[-1]}])
    if installed:
        engine.load()
    else:
        engine.nlp = {LANGUAGE: spacy.blank(LANGUAGE)}  # or it would download a model
    registry = RecognizerRegistry(supported_languages=[LANGUAGE])
    registry.load_predefined_recognizers(languages=[LANGUAGE], nlp_engine=engine)
    return AnalyzerEngine(registry=registry, nlp_engine=engine, supported_languages=[LANGUAGE])
