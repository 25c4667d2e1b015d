"""The `sekv` command: train | plan | export | evaluate | sweep | reproduce | report | generate | bench.

Nothing heavy is imported before a subcommand runs, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sekv import __version__
from sekv.errors import DataError, SeKVError

if TYPE_CHECKING:
    from rich.console import Console

    from sekv.generation import Answer

_BACKBONE = "smollm2-135m"
_BACKBONE_HELP = f"{_BACKBONE} (embedded, the default), a folder, or a Hub id"
_POLICY_HELP = "method, options in brackets: sekv[routing=mean,max_span=32]; the methods are listed below"
_BUDGET_HELP = "share of the context that a query may attend to (0.1 or 10%%), or a number of rows (409)"
_TRAINING_PACKAGES = {
    "lightning",
    "jsonargparse",
    "datasets",
    "wandb",
    "torchmetrics",
    "docstring_parser",
    "typeshed_client",
}

_TRACE_HELP = "keep what the first N samples of each task zoomed into, for sekv report (default: 0)"
_RESTART_HELP = "throw away the answers that DIR holds, instead of going on with them"

_MAIN_EPILOG = """\
a first session:
  sekv generate --backbone smollm2-135m --policy keydiff --budget 0.2 --context-file notes.txt --question "Who called?"
  sekv evaluate --backbone smollm2-135m --policy full,keydiff,snapkv --tasks niah:2048 --budget 0.1,0.2 --output results
  sekv plan --config configs/smollm2-135m.yaml
  sekv train --config configs/smollm2-135m.yaml
  sekv export runs/NAME/checkpoints/best.ckpt checkpoints/my-adapter

`sekv COMMAND --help` explains a command."""

_EVALUATE_EPILOG = """\
examples:
  sekv evaluate --policy full,nestedkv,hubkv:keydiff --tasks niah:4096 --budget 0.1,0.2 --output results
  sekv evaluate --policy 'sekv,sekv[routing=mean]' --adapter checkpoints/smollm2-135m \\
      --tasks qa.jsonl,niah:2048 --budget 10% --limit 5 --output results

a task is one of
  niah:LENGTH        a fact in LENGTH tokens of English, at depths from 0 to 100%
  ruler:NAME:LENGTH  a task of RULER, prompt and answer within LENGTH tokens; NAME is niah_single_1 to 3,
                     niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1 or qa_2.
                     [haystack=FILE] gives the essay tasks a text, [data=FILE] the qa tasks SQuAD's or HotpotQA's JSON
  ppl:LENGTH         perplexity of 256 tokens after a compressed context, LENGTH tokens in all, and its ratio to the
                     full cache's, over held-out English or [text=FILE]
  longbench:NAME, longbench_e:NAME, infinitebench:NAME, loogle:NAME, gsm8k, mmlu_pro, mmlu_pro:CATEGORY
                     with their own prompts, answer lengths and metrics, from the Hub or from the published files in
                     [data=FOLDER]; [max_length=N] leaves out the middle of longer prompts
  FILE.jsonl         lines with task, context, question, answer_prefix (texts), answers (list of texts), and optionally
                     max_new_tokens (64), metric (match_all, match_any, qa_f1, rouge_l, ...) and chat (true; false
                     leaves the chat template out)

DIR gets samples.jsonl (every answer, as it comes), then results.json and results.csv (one entry per policy, task and
  budget, with 95% bootstrap intervals), results.md (the scores as a table in Markdown) and scores.png. Killed and run
  again, the command goes on where it stopped; more policies, budgets or tasks may be added to the same DIR. torchrun
  and SLURM share the work over processes."""

_SWEEP_EPILOG = """\
the file, with its optional keys:
  policies: [full, nestedkv, "hubkv:keydiff", "sekv[routing=mean]"]
  budgets: [0.05, 0.1, 0.2]
  tasks: ["niah:{length}", "ruler:vt:{length}", "ppl:{length}", questions.jsonl]
  lengths: [2048, 4096]
  output: results/sweep
  seeds: [0, 1]                 # of generated samples; default [0]
  limit: 20                     # samples of each task and seed
  baseline: nestedkv            # paired differences to it, in paired.json and paired.csv
  query_aware: false
  backbone: smollm2-135m        # and adapter, dtype, device, cache, trace, as for sekv evaluate

on several devices or machines:
  torchrun --nproc-per-node 8 -m sekv sweep sweep.yaml
  srun --ntasks 32 sekv sweep sweep.yaml"""

_REPRODUCE_EPILOG = """\
examples:
  sekv reproduce --list
  sekv reproduce budget-table
  sekv reproduce needle-heatmaps --limit 3 --output results/needles
  sekv reproduce gsm8k-50-shot --data published/gsm8k
  sekv reproduce main-table --paper-scale --adapter checkpoints/llama-3.1-8b

DIR gets table.csv, table.md and a figure beside the answers. Stopped and run again, the command goes on where it
stopped. At paper scale torchrun and SLURM share the work, as for sekv sweep."""

_REPORT_EPILOG = """\
examples:
  sekv evaluate --policy 'full,nestedkv,sekv[routing=mean]' --tasks niah:2048 --budget 0.1,0.2 --trace 2 \\
      --output results
  sekv report results

The page shows scores with their intervals, needle heatmaps, memory and time, failed samples and, for the samples that
--trace kept, which spans of the context each new token zoomed into. It works on an unfinished folder too."""

_GENERATE_EPILOG = """\
examples:
  sekv generate --policy full --budget 1.0 --context-file report.txt --question "What was decided?"
  cat report.txt | sekv generate --policy sekv --adapter checkpoints/smollm2-135m --budget 0.1 --context-file - \\
      --question "What was decided?"

The answer goes to standard output, the account of rows and bytes to standard error."""


_EXPORT_EPILOG = """\
examples:
  sekv export runs/NAME/checkpoints/best.ckpt checkpoints/my-adapter
  sekv export runs/NAME/checkpoints/best.ckpt checkpoints/my-adapter --push-to-hub me/my-adapter --private

Then `--adapter checkpoints/my-adapter` or, from anywhere, `--adapter me/my-adapter`."""


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with the list of policies, which is looked up only when help is shown."""

    lists_policies = False

    def format_help(self) -> str:
        text = super().format_help()
        return f"{text}\npolicies:\n{_policy_lines()}\n" if self.lists_policies else text


def _policy_lines() -> str:
    from sekv.policies.registry import available_policies

    return "\n".join(f"  {name:<20} {line}" for name, line in available_policies().items())


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="sekv",
        description="Compress the key-value memory of a language model and ask it questions.",
        epilog=_MAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sekv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands.add_parser("train", add_help=False, help="train a SeKV adapter: --config FILE [--help for all settings]")
    commands.add_parser("plan", add_help=False, help="say what training, or inference, needs before anything is loaded")
    commands.add_parser("bench", add_help=False, help="measure time and memory of policies side by side")
    commands.add_parser("lm-eval", add_help=False, help="run lm-eval with the model sekv: run --model sekv --tasks ...")
    _add_export(commands)
    _add_evaluate(commands)
    _add_sweep(commands)
    _add_reproduce(commands)
    _add_report(commands)
    _add_generate(commands)
    return parser


def _add_export(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="make a folder with an adapter from a training checkpoint",
        description="Write OUT/adapter_config.json, OUT/adapter_model.safetensors and the model card OUT/README.md.",
        epilog=_EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help="checkpoint written by sekv train")
    command.add_argument("output", metavar="OUT", type=Path, help="folder of the adapter")
    command.add_argument("--results", metavar="F", type=Path, help="results.json of sekv evaluate, for the card")
    command.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload the folder to this repository of the Hub")
    command.add_argument("--private", action="store_true", help="of --push-to-hub: only you see a new repository")
    command.set_defaults(handler=_export)


def _add_evaluate(commands: Any) -> None:
    command = commands.add_parser(
        "evaluate",
        help="score policies on tasks at several budgets",
        description="Read each context once, compress it by every policy at every budget, ask, and score the answers.",
        epilog=_EVALUATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.lists_policies = True
    _add_model_flags(command)
    command.add_argument("--policy", required=True, metavar="P[,P...]", help=_POLICY_HELP)
    command.add_argument("--adapter", metavar="A", help="trained adapter, for sekv: a folder or a Hub id")
    command.add_argument("--tasks", required=True, metavar="T[,T...]", help="tasks, see below")
    command.add_argument("--budget", required=True, metavar="X[,X...]", help=_BUDGET_HELP)
    command.add_argument("--limit", type=int, metavar="N", help="most samples of each task (default: all)")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of generated tasks (default: 0)")
    command.add_argument("--query-aware", action="store_true", help="compress the question together with the context")
    command.add_argument("--baseline", metavar="P", help="one of the policies, to compare the others with per sample")
    command.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for results")
    command.add_argument("--restart", action="store_true", help=_RESTART_HELP)
    command.add_argument("--cache", type=Path, metavar="DIR", help="keep contexts and their memories here")
    command.add_argument(
        "--diagnose",
        action="store_true",
        help="find out where sekv loses what it gets wrong (router, bases, summaries, rows); several answers for each",
    )
    command.add_argument("--trace", type=int, default=0, metavar="N", help=_TRACE_HELP)
    command.set_defaults(handler=_evaluate)


def _add_sweep(commands: Any) -> None:
    command = commands.add_parser(
        "sweep",
        help="evaluate policies x budgets x tasks x lengths x seeds from one YAML",
        description="Run every combination of one YAML; killed and run again, it goes on where it stopped.",
        epilog=_SWEEP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.lists_policies = True
    command.add_argument("config", type=Path, metavar="FILE", help="the YAML, see below")
    command.add_argument("--output", type=Path, metavar="DIR", help="folder for results, instead of the file's")
    command.add_argument("--restart", action="store_true", help=_RESTART_HELP)
    command.set_defaults(handler=_sweep)


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="make a table or figure of the papers: reproduce --list names them",
        description="Run one experiment of configs/reproduce, in its small form or at the paper's scale.",
        epilog=_REPRODUCE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", metavar="NAME", nargs="?", help="of the experiment, or its YAML")
    command.add_argument("--list", action="store_true", help="say what there is")
    command.add_argument("--paper-scale", action="store_true", help="the published backbone, lengths and samples")
    command.add_argument("--output", type=Path, metavar="DIR", help="(default: results/reproduce/NAME-SCALE)")
    command.add_argument("--data", type=Path, metavar="FOLDER", help="published files of benchmarks, without network")
    command.add_argument("--configs", type=Path, metavar="DIR", help="other experiments (default: configs/reproduce)")
    command.add_argument("--backbone", metavar="B", help="instead of the experiment's")
    command.add_argument("--adapter", metavar="A", help="likewise")
    command.add_argument("--dtype", metavar="T", choices=("auto", "float32", "bfloat16", "float16"), help="likewise")
    command.add_argument("--device", metavar="D", help="likewise")
    command.add_argument("--limit", type=int, metavar="N", help="most samples of each task and seed, likewise")
    command.add_argument("--restart", action="store_true", help=_RESTART_HELP)
    command.set_defaults(handler=_reproduce)


def _add_report(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        help="make one HTML page of an evaluation's results",
        description="Write one page of what sekv evaluate or sweep left in DIR; it needs no other file and no network.",
        epilog=_REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("directory", type=Path, metavar="DIR", help="folder of the results")
    command.add_argument("--output", type=Path, metavar="F", help="the page (default: DIR/report.html)")
    command.set_defaults(handler=_report)


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="answer one question about one text",
        description="Read a text, compress it, and answer a question from the compressed memory.",
        epilog=_GENERATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.lists_policies = True
    _add_model_flags(command)
    command.add_argument("--policy", required=True, metavar="P", help=_POLICY_HELP)
    command.add_argument("--adapter", metavar="A", help="trained adapter, for sekv: a folder or a Hub id")
    command.add_argument("--budget", required=True, metavar="X", help=_BUDGET_HELP)
    command.add_argument("--context-file", required=True, metavar="F", help="UTF-8 text; - reads standard input")
    command.add_argument("--question", required=True, metavar="Q", help="what to ask about it")
    command.add_argument("--answer-prefix", default="", metavar="TEXT", help="beginning of the answer")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    command.add_argument("--query-aware", action="store_true", help="compress the question together with the context")
    command.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    command.add_argument("--temperature", type=float, metavar="X", help="of --sample (default: 1.0)")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of --sample (default: 0)")
    command.set_defaults(handler=_generate)


def _add_model_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backbone", default=_BACKBONE, metavar="B", help=_BACKBONE_HELP)
    command.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="(default: auto)"
    )
    command.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N (default: auto)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0, 2 for a mistake that a message explains, 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except SeKVError as error:
        print(f"sekv: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sekv: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`); pointing stdout elsewhere keeps the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"sekv: error: {where}{error.strerror or ' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:  # its flags belong to Lightning's own parser
        return int(_training_module("train.cli").main(arguments[1:]))
    if arguments[:2] == ["plan", "inference"]:
        return int(importlib.import_module("sekv.bench.plan").main(arguments[2:]))
    if arguments[:1] == ["plan"]:
        return int(_training_module("train.plan").main(arguments[1:]))
    if arguments[:2] == ["bench", "train"]:
        return int(_training_module("train.bench").main(arguments[2:]))
    if arguments[:1] == ["bench"]:
        return int(importlib.import_module("sekv.bench.cli").main(arguments[1:]))
    if arguments[:1] == ["lm-eval"]:  # likewise lm-eval's
        return _lm_eval(arguments[1:])
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    return int(options.handler(options))


def _training_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _TRAINING_PACKAGES:
            raise
        raise SeKVError(f"this command needs the package '{package}'; run: pip install 'sekv[train]'") from None


def _lm_eval(arguments: list[str]) -> int:
    try:
        from lm_eval._cli.harness import HarnessCLI

        import sekv.evaluation.lm_eval_model  # noqa: F401  registers the model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise SeKVError("this command needs the package 'lm-eval'; run: pip install 'sekv[lm-eval]'") from None
    sys.argv = ["sekv lm-eval", *arguments]
    harness = HarnessCLI()
    harness.execute(harness.parse_args())
    return 0


def _export(options: argparse.Namespace) -> int:
    export = _training_module("train.export")
    if options.push_to_hub is not None:
        from sekv.errors import AdapterError
        from sekv.hub import check_hub_access

        check_hub_access(options.push_to_hub, AdapterError)
    folder = export.export_checkpoint(
        options.checkpoint, options.output, name=options.push_to_hub, results=options.results
    )
    print(f"adapter written to {folder}")
    if options.push_to_hub is not None:
        print(f"pushed to {export.push_adapter(folder, options.push_to_hub, options.private)}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sekv.evaluation.runner import Evaluation
    from sekv.evaluation.session import Session
    from sekv.evaluation.tasks import split_tasks
    from sekv.policies.registry import split_specs

    _check_seed(options.seed)
    evaluation = Evaluation.plan(
        split_specs(options.policy),
        split_tasks(options.tasks),
        _split(options.budget),
        options.output,
        adapter=options.adapter,
        limit=options.limit,
        seeds=[options.seed],
        query_aware=options.query_aware,
        baseline=options.baseline,
        cache=options.cache,
        diagnose=options.diagnose,
        trace=options.trace,
    )
    session = Session(options.backbone, options.dtype, options.device, options.restart)
    session.run(evaluation, Console(), Console(stderr=True))
    return 0


def _sweep(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sekv.evaluation.sweep import Sweep

    sweep = Sweep.read(options.config)
    sweep.session(options.restart).run(sweep.plan(options.output), Console(), Console(stderr=True))
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sekv.evaluation.reproduce.experiment import find_experiment
    from sekv.evaluation.reproduce.run import list_experiments, reproduce

    console = Console()
    if options.list:
        console.print(list_experiments(options.configs).for_terminal())
        return 0
    if options.name is None:
        raise DataError("no experiment named; sekv reproduce --list says what there is")
    given = {key: getattr(options, key) for key in ("backbone", "adapter", "dtype", "device", "limit")}
    reproduce(
        find_experiment(options.name, options.configs),
        "paper" if options.paper_scale else "small",
        options.output,
        console,
        Console(stderr=True),
        data=options.data,
        restart=options.restart,
        **given,
    )
    return 0


def _report(options: argparse.Namespace) -> int:
    from sekv.evaluation.page import write_page

    print(f"written to {write_page(options.directory, options.output)}")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sekv.budget import Budget

    budget = Budget.parse(options.budget)
    if options.max_new_tokens < 1:
        raise DataError(f"--max-new-tokens {options.max_new_tokens} leaves no answer; give 1 or more")
    if options.temperature is not None and not (options.sample and options.temperature > 0):
        raise DataError("--temperature needs --sample and a number above 0")
    _check_seed(options.seed)
    context = _read_text(options.context_file)
    answer = _stream_answer(options, budget, context)
    _print_account(Console(stderr=True), answer)
    return 0


def _stream_answer(options: argparse.Namespace, budget: Any, context: str) -> Answer:
    import torch
    from rich.console import Console
    from rich.markup import escape
    from transformers import TextStreamer

    from sekv.adapter import SeKVAdapter
    from sekv.backbone import load_backbone
    from sekv.generation import ask, memory_ids, read_context
    from sekv.policies.registry import build_policy
    from sekv.prompt import split_prompt

    adapter = SeKVAdapter.from_pretrained(options.adapter) if options.adapter else None
    policy = build_policy(options.policy, adapter=adapter)
    errors = Console(stderr=True)
    with errors.status(f"loading {escape(options.backbone)}"):
        backbone = load_backbone(options.backbone, options.dtype, options.device)
    if adapter is not None:
        adapter.check_backbone(backbone)
        adapter.to(backbone.device)
    prompt = split_prompt(backbone.tokenizer, context, options.question, options.answer_prefix)
    prompt = prompt.fit(backbone.geometry.max_positions, options.max_new_tokens)
    if prompt.truncated:
        errors.print(f"the context is too long for the backbone: {prompt.truncated} tokens in its middle are left out")
    with errors.status("reading the context"):
        memory = read_context(backbone, memory_ids(prompt, options.query_aware), [policy])
    torch.manual_seed(options.seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": options.temperature or 1.0} if options.sample else {}
    return ask(
        memory,
        policy,
        budget,
        prompt,
        options.max_new_tokens,
        query_aware=options.query_aware,
        streamer=TextStreamer(backbone.tokenizer, skip_prompt=True, skip_special_tokens=True),  # type: ignore[arg-type]
        **sampling,
    )


def _print_account(console: Console, answer: Answer) -> None:
    from rich.table import Table

    from sekv.evaluation.report import format_bytes

    table = Table("rows", "resident", "host", "moved/token", "new tokens", "seconds")
    table.add_row(
        f"{answer.rows:.1f}",
        format_bytes(answer.resident_bytes),
        format_bytes(answer.host_bytes),
        format_bytes(answer.moved_bytes_per_token),
        str(len(answer.ids)),
        f"{answer.seconds:.2f}",
    )
    console.print(table)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise DataError(f"--seed {seed} is out of range; give a whole number from 0 to 2^63 - 1")


def _read_text(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"context file '{name}' cannot be read: {error.strerror}; give a text file, or - for stdin"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"context file '{name}' is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise DataError(f"the context in '{name}' is empty; give the text that the question is about")
    return text
