"""Run an encoder-decoder of transformers: the prompt is encoded once, the text is decoded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.decoder import DecoderBuild, NoExtension
from upshift.inference.generation.model import load_model, weight_bytes
from upshift.inference.padding import padded_rows
from upshift.inference.torch_computing import computing
from upshift.models.cache import cache_argument, check_kept
from upshift.models.generation_config import start_token


class TorchSeq2Seq(NoExtension):
    """An encoder-decoder in torch. Rows are not admitted beside others: absolute positions of decoders are counted
    from the cache, the same for all rows."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = load_model(build.source, build.setup.precision, build.setup.device, where=build.where)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._start = start_token(build.source)
        self._cache_argument = cache_argument(self.model)
        self.keep([])

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Encoders, too, may count positions from the first token: padding goes to the right."""
        ids, mask = padded_rows(prompts)
        self._mask = torch.from_numpy(mask).to(self.model.device)
        with computing(self.setup):
            found = self.model.get_encoder()(input_ids=torch.from_numpy(ids).to(self.model.device), attention_mask=self._mask)
        self._output, self._encoded = type(found), found.last_hidden_state
        logits = self.step(np.full(len(ids), self._start))
        check_kept(self.model, self._cache)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        with computing(self.setup):
            ids = torch.from_numpy(tokens[:, None]).to(self.model.device)
            logits = self.model(
                encoder_outputs=self._output(last_hidden_state=self._encoded), attention_mask=self._mask,
                decoder_input_ids=ids, **{self._cache_argument: self._cache}, use_cache=True,
            ).logits  # fmt: skip
        found: np.ndarray = logits[:, -1].float().cpu().numpy()
        return found

    def keep(self, rows: list[int]) -> None:
        if rows:
            kept = torch.tensor(rows, device=self.model.device)
            self._encoded, self._mask = self._encoded[kept], self._mask[kept]
            self._cache.batch_select_indices(kept)
            return
        from transformers import DynamicCache, EncoderDecoderCache

        self._cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._encoded = self._mask = torch.zeros(0)
