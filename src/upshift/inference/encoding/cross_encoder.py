"""Define ``upshift.CrossEncoder``: it scores pairs of texts, such as a query and a document, by the setup that won the race on
the user's own pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.encoding.model_config import EncodingConfig, read_pair_config
from upshift.inference.encoding.raced_model import RacedModel, check_texts
from upshift.inference.encoding.text_pair import Pair
from upshift.inference.resumable_output import is_text
from upshift.models.source import ModelSource


class CrossEncoder(RacedModel):
    """Score pairs of texts with a cross-encoder of sentence-transformers, or another classifier of texts of transformers.

    The scores are those of sentence-transformers' CrossEncoder: the model's files say which activation they have. The first
    call races the installed engines, as the Encoder's does. The arguments are the Encoder's.

    Raises:
        RequestError: a request is not possible, or the model is no classifier of texts. The message names what is possible.
        NothingFits: no setup keeps the limit.
    """

    def _read_config(self, source: ModelSource) -> EncodingConfig:
        return read_pair_config(source)

    def predict(self, pairs: Collection[Sequence[str]]) -> np.ndarray:
        """Return one score for each pair [N], or the scores of the labels [N, C] if the model has several, in fp32."""
        checked = check_pairs(pairs)
        if not checked:
            return np.empty(0, dtype=np.float32)
        rows = self.rows(checked)
        return rows[:, 0] if rows.shape[1] == 1 else rows

    def rank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Return the documents by their score for the query, the best first, as sentence-transformers' CrossEncoder does.

        Each result has ``corpus_id``, the document's place in the list, and ``score``. With ``return_documents``, it has the
        document's ``text``, too. ``top_k`` limits the number of results.

        Raises:
            RequestError: the model has several labels, and so no single score.
        """
        check_texts([query])
        check_texts(documents)
        if len(self.labels) > 1:
            raise RequestError(
                f"{self.source.reference!r} has {len(self.labels)} labels, and a rank needs one score; use predict instead"
            )
        scores = self.predict([(query, document) for document in documents]).tolist()
        results = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[:top_k]:
            text = {"text": documents[index]} if return_documents else {}
            results.append({"corpus_id": index, "score": scores[index], **text})
        return results


def check_pairs(pairs: Collection[Sequence[str]]) -> list[Pair]:
    """Return pairs of two texts each. Raise RequestError with the number of the first item that is none."""
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Collection):
        raise RequestError(f"predict() takes a list of pairs and was given {pairs!r:.80}; use predict([(query, document)])")
    checked = []
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(is_text, pair)):
            raise RequestError(
                f"pair {number} is {pair!r:.80}; give a list of pairs of two texts of Unicode characters: [(query, document)]"
            )
        checked.append(Pair(*pair))
    return checked
