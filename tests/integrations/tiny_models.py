"""Models from configurations, data and a tokenizer for the frameworks' tests: small, fp64, without dropout."""

import random
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

COUNT = 100  # samples an epoch
STEP = 16  # of all ranks together, so that the last step has 4


def gpt2() -> Any:
    """Its loss is divided by the count of tokens that it is given."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, **dropout
    )
    return GPT2LMHeadModel(config).double()


def bert() -> Any:
    """It takes a count and returns a mean all the same."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config).double()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).double()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number + 4 for number in range(60)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class Rows(Dataset[Any]):
    """Of different lengths: each batch is padded to its own longest."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Endless(IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        yield from classes()


def lines(count: int = COUNT, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(4, 64) for _ in range(drawn.randrange(5, 16))] for _ in range(count)]


def texts(count: int = COUNT, seed: int = 0) -> Rows:
    return Rows([{"input_ids": line} for line in lines(count, seed)])


def classes(count: int = COUNT, seed: int = 0) -> Rows:
    return Rows([{"input_ids": line, "labels": sum(line) % 3} for line in lines(count, seed)])


def words(count: int = COUNT, seed: int = 0) -> list[str]:
    return [" ".join(f"w{number - 4}" for number in line) for line in lines(count, seed)]


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def text_batch(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def class_batch(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {**padded(rows), "labels": torch.tensor([row["labels"] for row in rows])}


def params_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
