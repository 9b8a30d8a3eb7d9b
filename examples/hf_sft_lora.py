"""TRL's SFTTrainer with LoRA (PEFT), with samples by speed: the two lines that uneven adds are marked.

uneven run examples/hf_sft_lora.py --devices cpu,cpu@0.4
torchrun --nproc-per-node 2 examples/hf_sft_lora.py
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from uneven.integrations.transformers import attach  # uneven

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="runs/hf-sft-lora")
parser.add_argument("--epochs", type=float, default=2)
parser.add_argument("--samples", type=int, default=1000)
args = parser.parse_args()

# A model and a tokenizer of your own are loaded by `from_pretrained`; here nothing is downloaded.
words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "plus", "makes", "and"]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=splitter, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
set_seed(0)
pairs = torch.randint(0, 5, (args.samples, 2)).tolist()
train_set = Dataset.from_list([{"text": f"{words[a]} plus {words[b]} makes {words[a + b]}"} for a, b in pairs])
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
training_args = SFTConfig(
    output_dir=args.output_dir,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=False,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=training_args,
    train_dataset=train_set,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
attach(trainer)  # uneven
trainer.train()
trainer.save_model()  # the adapter alone
