"""Answer OpenAI's /v1/responses: at once, as a stream, or in the background, and return and drop those that are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from upshift.serving.engine_process import RequestRefused
from upshift.serving.messages import Refused
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.openai_responses import Usage
from upshift.serving.protocols.responses_answers import ResponseAnswer
from upshift.serving.protocols.responses_requests import Included, Item, ItemReference, ResponsesPrompt, ResponsesRequest
from upshift.serving.protocols.responses_store import Inputs, ResponseStore, StoredResponse, describe_inputs
from upshift.serving.refusals import FAULT, refusal_of

logger = logging.getLogger(__name__)
PATH = "/v1/responses"
PAGE_LIMIT = 100  # items of a page at most; OpenAI's
DEFAULT_LIMIT = 20  # likewise
MAX_BACKGROUND = 256  # answers in the background at once, also those whose model is still being loaded
RETRY_SECONDS = 1.0  # one of them may end at any time


AnyPrompt = TypeVar("AnyPrompt", bound=ResponsesPrompt)


class ChatServer(Protocol):
    """The parts of a server that these addresses need."""

    def name_model(self, request: AnyPrompt) -> AnyPrompt: ...

    async def answer_chat(self, answer: Any, chat: ChatRequest, path: str, on_end: Callable[[Usage], None]) -> Response: ...

    async def count_prompt(self, chat: ChatRequest) -> int: ...


class ResponsesAddresses:
    """The handlers of responses."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self._store = ResponseStore()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of answers in the background, by their ids

    def add_to(self, app: FastAPI, errors: dict[str, Any]) -> None:
        """Add the addresses to an application. ``errors`` describes their errors."""
        app.post(PATH, **errors)(self.respond)
        app.post(f"{PATH}/input_tokens", **errors)(self.count_tokens)
        app.get(f"{PATH}/{{id}}", **errors)(self.response)
        app.delete(f"{PATH}/{{id}}", **errors)(self.delete)
        app.get(f"{PATH}/{{id}}/input_items", **errors)(self.input_items)
        app.post(f"{PATH}/{{id}}/cancel", **errors)(self.cancel)

    async def respond(self, request: ResponsesRequest) -> Response:
        request = self._server.name_model(request)
        request.check()
        if request.background:
            self._check_background()
        earlier, items = self._read_items(request)
        chat = request.to_chat([*([] if earlier is None else earlier.items), *items])
        answer = ResponseAnswer(request, chat)
        inputs = describe_inputs(items, earlier) if request.store else Inputs()

        def keep(usage: Usage) -> None:
            if request.store:
                self._store.add(answer.body(usage), inputs)

        if not request.background:
            return await self._server.answer_chat(answer, chat, PATH, keep)
        chat.check()  # what is wrong with the request is told at once
        answer.status = "queued"
        body = answer.body(None)
        self._store.add(body, inputs)
        task = asyncio.create_task(self._answer_in_background(answer, chat, inputs, keep))
        self._tasks[answer.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(answer.id, None))
        await asyncio.sleep(0)  # the task begins, so that whoever cancels it finds its answer cancelled
        return JSONResponse(body)

    def _check_background(self) -> None:
        """Raise RequestRefused with status 429 if no more answers may be computed in the background."""
        if len(self._tasks) >= MAX_BACKGROUND or self._store.is_full:
            reason = f"{len(self._tasks):,} answers are computed in the background already; try again later"
            raise RequestRefused(Refused(id=0, status=429, why=reason, retry_after=RETRY_SECONDS))

    async def _answer_in_background(
        self, answer: ResponseAnswer, chat: ChatRequest, inputs: Inputs, keep: Callable[[Usage], None]
    ) -> None:
        answer.status = "in_progress"
        self._store.add(answer.body(None), inputs)
        try:
            await self._server.answer_chat(answer, chat, PATH, keep)
        except asyncio.CancelledError:
            answer.cut("cancelled")
            self._store.add(answer.body(None), inputs)
        except Exception as error:  # of any type: the client reads it from the response
            refusal = refusal_of(error)
            if refusal is None:
                logger.error("an answer in the background failed", exc_info=error)
            answer.cut("failed", refusal or FAULT)
            self._store.add(answer.body(None), inputs)

    async def stop(self) -> None:
        """Cancel the answers in the background."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def count_tokens(self, request: ResponsesPrompt) -> dict[str, Any]:
        request = self._server.name_model(request)
        earlier, items = self._read_items(request)
        chat = request.to_chat([*([] if earlier is None else earlier.items), *items])
        return {"object": "response.input_tokens", "input_tokens": await self._server.count_prompt(chat)}

    def response(self, id: str, stream: bool = False, include: Annotated[tuple[Included, ...], Query()] = ()) -> dict[str, Any]:
        """Return a kept response. ``include`` changes nothing: the request for the answer decided what the response has."""
        found = self._find(id)
        if stream:
            raise HTTPException(400, "a response that is kept comes as a whole; leave stream out")
        return found.body

    async def delete(self, id: str) -> dict[str, Any]:
        self._find(id)
        await self._cancel_task(id)
        self._store.remove(id)
        return {"id": id, "object": "response", "deleted": True}

    async def cancel(self, id: str) -> dict[str, Any]:
        if not self._find(id).body["background"]:
            raise HTTPException(400, f"the response {id!r} is not computed in the background; only those can be cancelled")
        await self._cancel_task(id)
        return self._find(id).body

    async def _cancel_task(self, id: str) -> None:
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def input_items(
        self,
        id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = DEFAULT_LIMIT,
        order: Literal["asc", "desc"] = "desc",
        include: Annotated[tuple[Included, ...], Query()] = (),
    ) -> dict[str, Any]:
        """Return a page of the items that a response was computed from."""
        inputs = self._find(id).inputs.items
        items = inputs if order == "asc" else inputs[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise HTTPException(404, f"after names {after[:100]!r}, which is no item of the response; give an id of its items")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": start + limit < len(items)}

    def _read_items(self, request: ResponsesPrompt) -> tuple[StoredResponse | None, list[Item]]:
        """Return the response that a request continues, and the request's own items, with those in the place of references.

        An item of the response that is continued is not repeated."""
        earlier = None if request.previous_response_id is None else self._find(request.previous_response_id)
        if earlier is not None and earlier.is_unfinished:
            raise HTTPException(400, f"the response {earlier.body['id']!r} is still computed; wait until it is complete")
        known = set() if earlier is None else {item["id"] for item in earlier.conversation}
        items: list[Item] = []
        for item in request.own_items():
            if not isinstance(item, ItemReference):
                items.append(item)
            elif item.id not in known:
                found = self._store.find_item(item.id)
                if found is None:
                    raise HTTPException(404, f"the item {item.id!r} is not kept here, or no longer; send the item itself")
                items.append(found)
        return earlier, items

    def _find(self, id: str) -> StoredResponse:
        found = self._store.find(id)
        if found is None:
            raise HTTPException(404, f"the response {id[:100]!r} is not kept here, or no longer; send the whole conversation")
        return found
