"""What an operator sets: `ServerSpec`."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.serve import AUTOSCALERS
from hone.serve.spec import EngineSpec

API_KEY_VARIABLE = "HONE_API_KEY"


class LimitsSpec(Spec):
    """What clients and models may take of the front."""

    max_connections: int = Field(4096, ge=1, description="Connections at once; more get 503 and Retry-After.")
    head_s: float = Field(20.0, gt=0, description="Seconds for a request's head, else the connection ends.")
    body_s: float = Field(60.0, gt=0, description="Seconds for a request's body, else 408.")
    text_processes: int = Field(2, ge=1, description="Processes for long texts and chat templates.")


class ProcessesSpec(Spec):
    """How many processes serve, and when a request goes to another replica than the one that holds its prompt's beginning."""

    api_server_count: int = Field(
        1, ge=1, le=64, description="Front processes (HTTP, tokenizing, events) that share the port and the engine."
    )
    data_parallel_size: int = Field(
        1, ge=1, le=64, description="Engines (replicas) behind the port, each with tensor_parallel_size x pipeline_parallel_size GPUs."
    )  # fmt: skip
    autoscaler: Annotated[Technique, Choice(AUTOSCALERS)] | None = Field(
        None, description="Starts and drains replicas with the load, data_parallel_size of them at first; --replicas=auto means hysteresis."
    )  # fmt: skip
    scale_interval_s: float = Field(5.0, gt=0, description="Seconds between two decisions of the autoscaler.")
    balance_abs_threshold: int = Field(
        32, ge=0, description="Sequences that the holder may have in progress beyond those of the least loaded replica."
    )
    balance_rel_threshold: float = Field(
        1.5, ge=1, description="The same as a factor; the request goes elsewhere when both are exceeded."
    )


class ServerSpec(Spec):
    """How a model folder is served over HTTP."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # --api_key=1234 is a text too
    without_effect: ClassVar[tuple[str, ...]] = ("engine.max_waiting",)
    """Fields of the engine that mean nothing in a server."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every address of this machine.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 is any free port.")
    api_key: str = Field(
        "", description=f"Key clients must send; '' reads ${API_KEY_VARIABLE}, and without that, none."
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="Names of the model for clients, the first one in replies; none is the folder's name."
    )
    chat_template: str = Field("", description="Jinja file to use in place of the model's own chat template.")
    generation_config: str = Field(
        "auto",
        description="Sampling defaults: auto (the model folder's generation_config.json), vllm (none), or another folder.",
    )
    max_queue: int = Field(1024, ge=0, description="Sequences that may wait; more get 503 and Retry-After.")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest request body.")
    processes: ProcessesSpec = Field(
        ProcessesSpec(), description="Fronts and replicas; --api_server_count and --data_parallel_size mean those here."
    )
    limits: LimitsSpec = Field(LimitsSpec(), description="Limits of connections, and the processes for long texts.")
    allowed_origins: tuple[str, ...] = Field((), description="Origins of pages that may call (CORS); '*' is any.")
    ssl_keyfile: str = Field("", description="Private key (PEM) for HTTPS.")
    ssl_certfile: str = Field("", description="Certificate chain (PEM) for HTTPS.")
    ssl_ca_certs: str = Field("", description="CA certificates (PEM): clients must have a certificate of one of them.")
    stall_s: float = Field(30.0, gt=0, description="Seconds without a finished step after which /health is 503.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    metrics_prefix: str = Field(
        "", pattern=r"^[a-z_]*$", description="Repeat every metric under this prefix too, e.g. vllm."
    )
    tool_call_parser: str = Field(
        "",
        description="Form in which the model writes tool calls: hermes, llama3_json, mistral, pythonic, qwen3_coder.",
    )
    enable_auto_tool_choice: bool = Field(False, description="The model may choose to call tools (tool_choice auto).")
    reasoning_parser: str = Field("", description="Form of the model's reasoning, kept apart: deepseek_r1 or qwen3.")
    pooling: Literal["auto", "mean", "last"] = Field(
        "auto",
        description="Hidden states that are an embedding; auto: what the folder's 1_Pooling/config.json says, else the last.",
    )
    engine: EngineSpec = Field(EngineSpec(), description="The engine.")

    @model_validator(mode="before")
    @classmethod
    def _flat_names(cls, values: Any) -> Any:
        """Accepts vLLM's names of the numbers of processes and of adapters, which have no group there."""
        if not isinstance(values, dict):
            return values
        if flat := {name: values[name] for name in ("lora_modules", "allow_runtime_lora_updating") if name in values}:
            engine = values.get("engine", {})
            engine = engine.model_dump(exclude_unset=True) if isinstance(engine, EngineSpec) else dict(engine)
            engine["lora"] = {**engine.get("lora", {}), **flat}
            values = {name: value for name, value in values.items() if name not in flat} | {"engine": engine}
        found, group = dict(values), values.get("processes", {})
        group = group.model_dump(exclude_unset=True) if isinstance(group, ProcessesSpec) else group
        if "replicas" in found:
            count = found.pop("replicas")
            given = group.get("autoscaler") if isinstance(group, dict) else None
            policy = given if isinstance(given, str) else {"kind": "hysteresis", **(given or {})}
            found |= {"autoscaler": policy} if count == "auto" else {"data_parallel_size": count}
        for name in ("api_server_count", "data_parallel_size", "autoscaler"):
            if name in found and isinstance(group, dict):
                group = found["processes"] = {**group, name: found.pop(name)}
        return found

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _no_empty_name(cls, names: Any) -> Any:
        return tuple(name for name in names if name != "") if isinstance(names, list | tuple) else names

    @model_validator(mode="after")
    def _all_have_effect(self) -> Self:
        """Refuses what would be ignored: whoever sets a field expects something of it."""
        engine, processes = self.engine, self.processes
        if taken := sorted(set(engine.lora.named_paths()) & set(self.served_model_name)):
            raise ValueError(f"lora_modules and served_model_name both have '{taken[0]}'")
        several = processes.data_parallel_size > 1 or processes.autoscaler is not None
        sizes = [
            name for name in ("num_pages", "kv_cache_memory_bytes", "gpu_memory_utilization") if getattr(engine, name)
        ]
        if len(sizes) > 1:
            raise ValueError(
                f"{' and '.join(f'engine.{name}' for name in sizes)} size the same cache: give one of them"
            )
        for name, has_effect, needs in (
            ("engine.max_waiting", False, "a server's limit is max_queue"),
            ("engine.max_delay_s", engine.batching == "dynamic", "only engine.batching=dynamic waits"),
            ("engine.eviction", engine.enable_prefix_caching, "without engine.enable_prefix_caching no page is kept"),
            ("engine.distributed_timeout_seconds", engine.num_ranks > 1, "the engine is one process"),
            ("processes.scale_interval_s", processes.autoscaler is not None, "the number of replicas is fixed"),
            ("processes.balance_abs_threshold", several, "there is one replica"),
            ("processes.balance_rel_threshold", several, "there is one replica"),
        ):
            group, _, field = name.partition(".")
            given = getattr(self, group)
            if not has_effect and getattr(given, field) != type(given).model_fields[field].default:
                raise ValueError(f"{name} has no effect: {needs}")
        return self

    def tls(self) -> dict[str, Any]:
        """uvicorn's options for HTTPS; {} without a certificate. Raises SpecError for files that do not serve."""
        if not self.ssl_certfile:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name):
                    raise SpecError(f"{name} is given without ssl_certfile", fix="give --ssl_certfile=FILE, too")
            return {}
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise SpecError(f"{name}: no file {path}", fix="give a PEM file")
        options: dict[str, Any] = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile or None}
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, options["ssl_keyfile"])
            if self.ssl_ca_certs:
                context.load_verify_locations(self.ssl_ca_certs)
                options |= {"ssl_ca_certs": self.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        except (ssl.SSLError, OSError) as error:
            raise SpecError(
                f"the certificate in {self.ssl_certfile} cannot be used: {error}",
                fix="give a certificate and its key (--ssl_keyfile) in PEM form",
            ) from None
        return options


class ServeConfig(ServerSpec):
    """What `hone serve` is given: the server's fields, and what is served where. A file of these fields is its --config."""

    model: str = Field("", description="Model folder, or hf:OWNER/NAME; the argument MODEL_FOLDER means the same.")
    device: str = Field("cpu", description="Device of the engine: cpu or cuda.")

    @model_validator(mode="after")
    def _of_the_device(self) -> Self:
        if self.engine.num_threads is not None and self.device != "cpu":
            raise ValueError(f"engine.num_threads has no effect: they are a CPU's, and the device is {self.device}")
        return self
