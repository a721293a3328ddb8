"""Define the requests that load and unload adapters while the server runs, with vLLM's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from upshift.errors import RequestError
from upshift.serving.adapter_files import find_base, read_adapter_folder
from upshift.serving.messages import LoadAdapter, UnloadAdapter
from upshift.serving.protocols.chat_messages import CheckedBody

AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class LoadAdapterRequest(CheckedBody):
    lora_name: AdapterName = Field(description="the model of requests for this adapter")
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = Field(
        description="the folder of the adapter, within that of --adapter-folder"
    )

    def order(self, folder: Path, models: dict[str, str]) -> tuple[str, LoadAdapter]:
        """Return the name of the adapter's model, and the order for its engine.

        ``models`` are references of the models that take adapters, by their names. Raise RequestError for a folder that is not
        within ``folder``, or that has no adapter for one of these models."""
        try:
            path = (folder / self.lora_path).resolve()
            is_within = path.is_relative_to(folder.resolve())
        except (OSError, ValueError):  # a path with a zero byte, or one that is too long
            is_within = False
        if not is_within:
            raise RequestError(f"lora_path {self.lora_path!r} is not within the folder of --adapter-folder; name a folder there")
        try:
            adapter = read_adapter_folder(path)
        except RequestError as error:
            message = str(error).replace(str(path), self.lora_path)
            raise RequestError(message.replace(str(folder.resolve()), "the folder of --adapter-folder")) from None
        return find_base(self.lora_name, adapter._replace(folder=Path(self.lora_path)), models), LoadAdapter(
            name=self.lora_name, folder=str(path)
        )


class UnloadAdapterRequest(CheckedBody):
    lora_name: AdapterName

    def order(self) -> UnloadAdapter:
        return UnloadAdapter(name=self.lora_name)
