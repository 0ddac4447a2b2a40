"""`redraft train-drafter`: makes a base EAGLE-3 head for a target out of the target's own answers.

Prompts, answers, draft vocabulary, training and judging in one go, with one seed. Generation is resumed where it was
stopped; the artifact's manifest names the command, the data's hash, and what the head earned on prompts it never saw.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from learner.evaluator import Judged, judge
from learner.example import Example
from learner.initial import choose_draft_vocabulary, head_config, initial_head
from learner.trainer import Progress, TrainReport, TrainSettings, bf16_pays, train
from ops.corpus import Corpus
from ops.distill_data import DataSettings, generate, requests_for
from ops.prompt_sets import domains as shipped_domains
from shared.artifact import Artifact, Manifest, save_folder
from shared.config import DEFAULT_TARGET, Config
from shared.models.eagle3 import Eagle3Head
from shared.models.target import LoadedModel, load_model

DISTILLED = ("chat", "code", "maths")  # what a base learns from; the drift domains of the demo are never among them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=DEFAULT_TARGET, help="alias, folder or hub name")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "fp16", "int8", "fp32", "bf16"), help="weight format"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for drafter.safetensors and manifest.json")
    parser.add_argument("--prompts", type=int, default=1000, help="training prompts a domain")
    parser.add_argument("--answers", type=int, default=0, help="stop after this many in all (default: every prompt)")
    parser.add_argument("--held-out", type=int, default=60, help="judging prompts a domain")
    parser.add_argument("--max-tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--batch", type=int, default=64, help="answers generated together")
    parser.add_argument("--draft-vocab", type=int, default=16384, help="tokens the head can draft")
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over the answers")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW, at its highest")
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens learnt from in a step")
    parser.add_argument("--ttt-steps", type=int, default=3, help="draft depths unrolled")
    parser.add_argument("--gamma", type=int, default=4, help="for judging")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, first weights and order")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: all cores)")
    parser.add_argument(
        "--data", type=Path, help="where answers are kept (default: <home>/distill/<target>-seed<seed>)"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the whole distillation and returns 0."""
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console()
    home = Config(home=getattr(args, "home", None) or Config().home).home_path
    target = load_model(args.target, home=home, weights=args.dtype)
    folder = args.data or home / "distill" / f"{target.name}-seed{args.seed}"
    data = DataSettings(DISTILLED, "train", args.prompts, args.max_tokens, args.batch, args.seed, answers=args.answers)
    corpus = _answers(target, data, folder / "train")
    held_out = {
        domain: _answers(
            target,
            DataSettings(
                (domain,), "held_out", args.held_out, args.max_tokens, args.batch, args.seed, greedy_only=True
            ),
            folder / f"held_out-{domain}",
        )
        for domain in shipped_domains()
    }
    head = _fresh_head(args, home, corpus, target)
    examples = [Example(record, features) for record, features in corpus]
    report = _train(head, examples, args)
    metrics = {domain: _measure(head, answers, args.gamma) for domain, answers in held_out.items()}
    manifest = Manifest(
        version="base",
        kind="eagle3",
        form="full",
        target=target.fingerprint,
        created_at=time.time(),
        config=head.config.to_dict(),
        metrics={"held_out": metrics, "gamma": args.gamma, "training": _training_facts(report)},
        origin={
            "command": _command(args),
            "seed": args.seed,
            "data_sha256": corpus.digest(),
            "answers": len(examples),
            "tokens": sum(len(example.record.output_ids) for example in examples),
            "torch": torch.__version__,
        },
    )
    tensors = {name: t.half() if t.is_floating_point() else t.to(torch.int32) for name, t in head.state_dict().items()}
    save_folder(Artifact(manifest, tensors), args.out)
    console.print(_table(metrics))
    console.print(f"Saved to {args.out}")
    return 0


def _answers(target: LoadedModel, data: DataSettings, folder: Path) -> Corpus:
    corpus = Corpus(folder)
    requests = requests_for(target, data)
    generate(target, requests, corpus, batch=data.batch)
    corpus.only = {request.id for request in requests}  # an earlier call may have asked for more
    return corpus


def _fresh_head(args: argparse.Namespace, home: Path, corpus: Corpus, target: LoadedModel) -> Eagle3Head:
    outputs = (torch.from_numpy(record.output_ids.astype(np.int64)) for record, _ in corpus)
    draft_ids = choose_draft_vocabulary(outputs, min(args.draft_vocab, target.token_count), target.vocab_size)
    plain = load_model(args.target, home=home, device=str(target.device), weights="fp32")
    config = head_config(plain.model, len(draft_ids), target.max_positions)
    return initial_head(plain.model, config, draft_ids, args.seed)


def _train(head: Eagle3Head, examples: Sequence[Example], args: argparse.Namespace) -> TrainReport:
    settings = TrainSettings(
        learning_rate=args.learning_rate,
        batch_tokens=args.batch_tokens,
        epochs=args.epochs,
        ttt_steps=args.ttt_steps,
        bf16=bf16_pays(next(head.parameters()).device),
        seed=args.seed,
    )
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Bars(*columns, TimeRemainingColumn()) as bars:
        bar = bars.add_task("", total=None, state="")

        def show(progress: Progress) -> None:
            overlap = " ".join(f"{value:.2f}" for value in progress.overlap)
            state = f"loss {progress.loss:.3f}  overlap {overlap}"
            bars.update(bar, total=progress.steps, completed=progress.step, state=state)

        return train(head, examples, settings=settings, progress=show)


def _measure(head: Eagle3Head, answers: Corpus, gamma: int) -> dict[str, float]:
    """Counts on held-out greedy answers, the two ratios that people ask for, and vocabulary coverage."""
    examples = [Example(record, features) for record, features in answers]
    judged: list[Judged] = judge(head, examples, gamma)
    positions, first = sum(j.positions for j in judged), sum(j.first for j in judged)
    accepted, tested = sum(j.accepted for j in judged), sum(j.tested for j in judged)
    ids = np.concatenate([example.record.output_ids for example in examples])
    covered = np.isin(ids, head.draft_ids.numpy()).sum()
    return {
        "requests": len(judged),
        "positions": positions,
        "alpha_first": round(first / positions, 4),
        "alpha": round(accepted / tested, 4),
        "accepted": round(accepted, 1),
        "tested": round(tested, 1),
        "coverage": round(float(covered) / len(ids), 4),
    }


def _training_facts(report: TrainReport) -> dict[str, float]:
    return {
        "steps": report.steps,
        "tokens": report.tokens,
        "seconds": round(report.seconds, 1),
        "loss_first": round(report.loss_first, 4),
        "loss_last": round(report.loss_last, 4),
        "lost": round(report.lost, 5),
    }


def _command(args: argparse.Namespace) -> str:
    shown = (
        "target",
        "prompts",
        "answers",
        "held_out",
        "max_tokens",
        "draft_vocab",
        "epochs",
        "learning_rate",
        "batch_tokens",
        "ttt_steps",
        "seed",
    )
    return "redraft train-drafter " + " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in shown)


def _table(metrics: dict[str, dict[str, float]]) -> Table:
    table = Table("domain", "α first", "α at γ", "coverage", "requests", title="Held-out greedy answers")
    for domain, row in metrics.items():
        numbers = (f"{row[name]:.3f}" for name in ("alpha_first", "alpha", "coverage"))
        table.add_row(domain, *numbers, str(row["requests"]))
    return table
