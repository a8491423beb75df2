"""Asks the unmodified model, through transformers, and keeps the questions that make the gate.

The messages before the question are the same every time: their KV is computed once and cut back after each question.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.facts import collect_facts
from bench.progress import Progress, say
from bench.speedrun.gate.protocol import Message, describe, messages
from bench.speedrun.gate.questions import LETTERS, Question, question_pool
from bench.speedrun.gate.record import CONTINUATION_TOKENS, NUM_QUESTIONS, Continuation, Gate, GateError, ScoredQuestion
from bench.speedrun.gate.selection import select
from bench.speedrun.model_files import load_tokenizer, model_hash
from bench.speedrun.prompts import chat_prompt

NUM_CONTINUATIONS = 6
CONTINUATION_PROMPT_TOKENS = 60


def build_gate(model_dir: Path, dtype: str = "auto", device: str = "auto") -> Gate:
    """Raises GateError and ModelFilesError. `dtype` auto: float16 on a GPU, float32 on a CPU."""
    digest = model_hash(model_dir)
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype if dtype != "auto" else "float16" if device == "cuda" else "float32"
    say(f"gate: loading {model_dir} in {dtype} on {device}")
    unmodified = Unmodified(model_dir, dtype, device)
    questions = question_pool()
    scored = unmodified.score(questions)
    chosen = select(scored, NUM_QUESTIONS)
    prompts = continuation_prompts(model_dir)
    return Gate(
        model=model_dir.resolve().name,
        model_hash=digest,
        dtype=dtype,
        pool_size=len(questions),
        protocol=describe(),
        questions=chosen,
        continuations=unmodified.continue_all(prompts),
        facts=asdict(collect_facts()),
    )


def continuation_prompts(model_dir: Path) -> list[list[Message]]:
    tokenizer = load_tokenizer(model_dir)
    return [
        chat_prompt(tokenizer, "continuation", index, CONTINUATION_PROMPT_TOKENS) for index in range(NUM_CONTINUATIONS)
    ]


class Unmodified:
    """The model as transformers runs it."""

    def __init__(self, model_dir: Path, dtype: str, device: str):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        if not self.tokenizer.chat_template:
            raise GateError(f"{model_dir} has no chat template; the gate asks an instruction-tuned model")
        self.model: Any
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self.model.to(device).eval()
        self.device = device
        self.letter_ids = [self.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]

    def prompt_ids(self, conversation: list[Message]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])

    @torch.inference_mode()
    def score(self, questions: list[Question]) -> list[ScoredQuestion]:
        """One forward pass a question, after one over what all prompts have in common."""
        from transformers import DynamicCache

        prompts = [self.prompt_ids(messages(question)) for question in questions]
        common = common_prefix(prompts)
        cache = DynamicCache()
        self.model(self.tensor(prompts[0][:common]), past_key_values=cache)
        scored = []
        with Progress("gate: questions", len(questions)) as progress:
            for question, ids in zip(questions, prompts):
                output = self.model(self.tensor(ids[common:]), past_key_values=cache, logits_to_keep=1)
                cache.crop(common - len(ids))
                scored.append(self.read(question, output.logits[0, -1].float()))
                progress.update(len(scored), "asked")
        return scored

    def read(self, question: Question, logits: torch.Tensor) -> ScoredQuestion:
        best, second = torch.topk(logits[self.letter_ids], 2).values.tolist()
        key = LETTERS[int(logits[self.letter_ids].argmax())]
        is_letter = int(logits.argmax()) == self.letter_ids[LETTERS.index(key)]
        return ScoredQuestion(question, key, best - second, is_letter)

    @torch.inference_mode()
    def continue_all(self, prompts: list[list[Message]]) -> list[Continuation]:
        done = []
        with Progress("gate: continuations", len(prompts)) as progress:
            for conversation in prompts:
                ids = self.tensor(self.prompt_ids(conversation))
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=CONTINUATION_TOKENS
                )
                text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
                done.append(Continuation(conversation, CONTINUATION_TOKENS, text))
                progress.update(len(done), f"of {CONTINUATION_TOKENS} tokens")
        return done

    def tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.device)


def common_prefix(prompts: list[list[int]]) -> int:
    """Length of the longest prefix that all share, at most one less than the shortest prompt."""
    shortest = min(len(ids) for ids in prompts)
    first = prompts[0]
    return next(
        (place for place in range(shortest - 1) if any(ids[place] != first[place] for ids in prompts)), shortest - 1
    )
