"""What `hone chat` is given beside the fields of sampling."""

from __future__ import annotations

from pydantic import Field

from hone.base.spec import Spec
from hone.serve.http.spec import API_KEY_VARIABLE
from hone.serve.spec import EngineSpec

NOT_SHOWN = ("logprobs", "prompt_logprobs")
"""Fields of sampling that ask for figures, which a chat does not show."""
TEXT_TOKENS = 64
"""Most tokens of a continuation without a limit: a model without a chat template seldom ends by itself."""
OF_A_FOLDER = ("chat_template", "generation_config", "engine")
OF_A_SERVER = ("model", "api_key")


class ChatSpec(Spec):
    """Which model is talked to, and how."""

    url: str = Field("", description="Server to talk to in place of a folder: any with OpenAI's API, http://HOST:PORT.")
    model: str = Field("", description="Name of the server's model; empty is the first that it names.")
    api_key: str = Field("", description=f"The server's key; '' reads ${API_KEY_VARIABLE}.")
    system: str = Field("", description="System prompt.")
    chat_template: str = Field("", description="Jinja file to use in place of the model's own chat template.")
    generation_config: str = Field(
        "auto",
        description="Sampling defaults: auto (the model folder's generation_config.json), vllm (none), or another folder.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description=f"Most tokens of an answer; empty: what the context holds, without a chat template {TEXT_TOKENS}."
    )  # fmt: skip
    engine: EngineSpec = Field(EngineSpec(), description="The engine, of one sequence where max_num_seqs is empty.")
