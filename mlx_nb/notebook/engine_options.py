"""What ``%mlx_engine`` understands: its subcommands, their options, and how those of ``start`` become settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError

from ..config import EngineConfig, SchedulerConfig, SingleStream, SparsePrefill, Speculation
from ..remote import Remote
from ..session.keys import find_key
from .arguments import Option, Options, did_you_mean, variable

__all__ = ["CACHE_ACTIONS", "COMMANDS", "engine_config", "help_text", "remote_engine", "single_stream"]

CACHE_ACTIONS = ("save", "load", "clear", "stats")

_OUT = Option("-o --out", "put it into this variable", "NAME", variable)
_ENGINE = Option("-e --engine", "which engine, if not the current one", "NAME")

_SCHEDULER = (
    Option("--max-num-seqs", "most requests that run at once", "N", int),
    Option("--max-num-batched-tokens", "prompt tokens read at once", "N", int),
    Option("--prefill-batch-size", "prompts read together", "N", int),
    Option("--completion-batch-size", "most answers written together", "N", int),
    Option("--prefill-step-size", "most tokens of a prompt read in one step", "N", int),
    Option("--policy", "order of requests", "fcfs|priority"),
    Option("--cache-memory-mb", "most memory of the prefix cache, in MiB", "MB", float),
    Option("--cache-memory-percent", "or as a share (0 to 1) of what the engine may use", "P", float),
)
_ENGINE_FIELDS = (
    Option("--stream-interval", "tokens from one streamed piece to the next", "N", int),
    Option("--step-interval", "least seconds between two of them", "S", float),
    Option("--gpu-memory-utilization", "share (0 to 1) of memory that the engine may use", "P", float),
)

_SINGLE = (
    Option(
        "--draft-model", "a smaller model of the same vocabulary that guesses ahead, or a drafter", "MODEL"
    ),
    Option(
        "--draft-kind",
        "prompt_lookup: the text so far; mtp: the model's own heads; drafter: what was trained for it",
        "KIND",
    ),
    Option("--draft-tokens", "guesses a step", "N", int),
    Option(
        "--specprefill-draft-model", "a smaller model that chooses what of a long prompt is read", "MODEL"
    ),
    Option("--specprefill-threshold", "tokens from which on a prompt is long (8192)", "N", int),
    Option("--specprefill-keep-pct", "share of it that is read (0.3)", "P", float),
    Option("--specprefill-backbone-pct", "share that is read in any case, spread evenly (0)", "P", float),
    Option("--max-kv-size", "most tokens of a request that are kept", "N", int),
)
"""These go with --simple."""

COMMANDS = {
    "start": Options(
        "%mlx_engine start MODEL [options]    load a model: demo, a Hub id, a folder, a .gguf file or an alias",
        Option("--name", "what to call the engine; several can run side by side", "NAME"),
        Option("--adapter", "folder of a LoRA adapter", "FOLDER"),
        Option("--trust-remote-code", "run code that comes with the model"),
        *_SCHEDULER,
        Option("--no-prefix-cache", "keep nothing of finished requests"),
        Option("--kv-bits", "quantise stored prefixes to 2, 3, 4, 6 or 8 bits (lossy)", "N", int),
        Option("--kv-group-size", "with groups of 32, 64 or 128", "N", int),
        *_ENGINE_FIELDS,
        Option("--idle-unload", "seconds without a request until the model leaves memory", "S", float),
        Option("--distributed", "divide it among the processes of mlx.launch, in a kernel started by that"),
        Option("--simple", "one request at a time, at the speed of a single stream"),
        *_SINGLE,
        Option("--blas-threads", "threads of OpenBLAS on a CPU, for all engines", "N", int),
    ),
    "connect": Options(
        "%mlx_engine connect URL [options]    use a server of OpenAI's API: mlx_lm.server, vllm-mlx, vLLM",
        Option("--model", "which model, if it has several", "MODEL"),
        Option("--name", "what to call the engine; several can run side by side", "NAME"),
        Option("--server", "what it is, if it can't tell", "openai|vllm|vllm-mlx|mlx-lm"),
        Option("--concurrency", "most requests that it has at once (16)", "N", int),
        Option("--policy", "order of requests", "fcfs|priority"),
        Option("--timeout", "seconds without a sign of life that it may take (300)", "S", float),
        Option("--patience", "seconds that it is asked again when it is down or busy (120)", "S", float),
        Option("--key-env", "the environment variable with the key (OPENAI_API_KEY)", "NAME"),
        Option("--ask-key", "ask for the key"),
    ),
    "use": Options("%mlx_engine use NAME                 make it the current engine"),
    "stop": Options("%mlx_engine stop [NAME]              stop it and free its memory"),
    "restart": Options("%mlx_engine restart [NAME]           stop it and start it again as it was"),
    "pause": Options("%mlx_engine pause [NAME]             start no more requests; those that run go on"),
    "resume": Options("%mlx_engine resume [NAME]            start them again"),
    "list": Options("%mlx_engine list                     all engines; * marks the current one"),
    "status": Options(
        "%mlx_engine status [NAME]            how the engine is doing; a live view in a notebook"
    ),
    "stats": Options("%mlx_engine stats [NAME] [-o VAR]    statistics, as a dict", _OUT),
    "requests": Options("%mlx_engine requests [NAME] [-o VAR] live requests, as a DataFrame", _OUT),
    "abort": Options(
        "%mlx_engine abort ID … | --all       end requests, which keep the text they have",
        Option("--all", "all requests of the engine"),
        _ENGINE,
    ),
    "cache": Options(
        "%mlx_engine cache save|load FOLDER   keep stored prefixes in a folder, and take them from there\n"
        "%mlx_engine cache clear|stats        forget them; look at them, as a dict",
        _ENGINE,
        _OUT,
    ),
    "warm": Options("%mlx_engine warm [NAME]              compile what the first requests need"),
    "monitor": Options("%mlx_engine monitor [NAME]           a live view, with buttons to abort"),
    "models": Options("%mlx_engine models                   what is on disk, and what runs"),
    "alias": Options(
        "%mlx_engine alias [NAME MODEL]       give a model a short name; without, show all",
        Option("--remove", "take a name of yours away", "NAME"),
    ),
    "doctor": Options("%mlx_engine doctor                   what this installation lacks, and how to get it"),
    "help": Options("%mlx_engine help [COMMAND]           this text"),
}


def engine_config(given: dict[str, Any]) -> EngineConfig:
    """Settings from the options of ``start``, which are taken out of `given`."""
    scheduler: dict[str, Any] = {
        "enable_prefix_cache": not given.pop("no_prefix_cache", False),
        **_taken(given, _SCHEDULER),
    }
    if "max_kv_size" in given:
        scheduler["max_kv_size"] = given.pop("max_kv_size")
    bits, group = given.pop("kv_bits", None), given.pop("kv_group_size", None)
    if bits is not None:
        scheduler |= {"kv_cache_quantization": True, "kv_cache_quantization_bits": bits}
    if group is not None:
        if bits is None:
            raise UsageError("--kv-group-size goes with --kv-bits")
        scheduler["kv_cache_quantization_group_size"] = group
    engine = _taken(given, _ENGINE_FIELDS)
    if "idle_unload" in given:
        engine["idle_unload_s"] = given.pop("idle_unload")
    return EngineConfig(scheduler_config=SchedulerConfig(**scheduler), **engine)


def remote_engine(url: str, given: dict[str, Any]) -> tuple[Remote, EngineConfig]:
    """The server and the settings that ``connect`` asks for."""
    asked: dict[str, Any] = _picked(given, "model", "server", "concurrency")
    asked |= {f"{name}_s": value for name, value in _picked(given, "timeout", "patience").items()}
    remote = Remote(url, **asked)
    key = find_key(remote.url, given.get("key_env"), ask=given.get("ask_key", False))
    return replace(remote, key=key), EngineConfig(
        scheduler_config=SchedulerConfig(**_picked(given, "policy"))
    )


def single_stream(given: dict[str, Any]) -> SingleStream | None:
    """What ``start --simple`` asks for, taken out of `given`; None without --simple."""
    simple = given.pop("simple", False)
    asked = _taken(given, _SINGLE)
    if asked and not simple:
        raise UsageError(f"--{min(asked).replace('_', '-')} goes with --simple")
    if not simple:
        return None
    size = asked.pop("max_kv_size", None)
    if size is not None:
        given["max_kv_size"] = size
    scorer = asked.pop("specprefill_draft_model", None)
    shares = {
        name.removeprefix("specprefill_"): asked.pop(name)
        for name in list(asked)
        if name.startswith("specprefill_")
    }
    if shares and scorer is None:
        raise UsageError(f"--specprefill-{min(shares).replace('_', '-')} goes with --specprefill-draft-model")
    sparse = None if scorer is None else SparsePrefill(**shares)
    kind = asked.get("draft_kind", "model" if "draft_model" in asked else None)
    if kind is None and asked:
        raise UsageError("--draft-tokens goes with --draft-model or --draft-kind")
    speculation = None
    if kind is not None:
        speculation = Speculation(kind, asked.get("draft_model"), asked.get("draft_tokens"))
    return SingleStream(speculation, scorer, sparse)


def help_text(command: str | None = None) -> str:
    """Of one subcommand, or of all."""
    if command is None:
        return "\n".join(options.help() for options in COMMANDS.values())
    if command not in COMMANDS:
        raise UsageError(f"unknown command %mlx_engine {command}: {did_you_mean(command, COMMANDS)}")
    return COMMANDS[command].help()


def _picked(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _taken(given: dict[str, Any], options: tuple[Option, ...]) -> dict[str, Any]:
    return {option.name: given.pop(option.name) for option in options if option.name in given}
