"""A HuggingFace Trainer: a tiny BERT, made from its configuration, learns which of two halves has more ones."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tether.huggingface import TetherCallback


class Halves(Dataset):
    """Sequences of zeros and ones; the label says whether the second half has more ones than the first."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 2, (count, 16), generator=generator)
        self.labels = (self.tokens[:, 8:].sum(1) > self.tokens[:, :8].sum(1)).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir="huggingface_trainer",
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Halves(2048, seed=0),
        eval_dataset=Halves(512, seed=1),
        compute_metrics=lambda found: {"error": float((found.predictions.argmax(1) != found.label_ids).mean())},
        callbacks=[TetherCallback()],
    )
    trainer.train()
    print(f"error {trainer.evaluate()['eval_error']:.4f}")
    torch.save(trainer.model.state_dict(), "huggingface_trainer.pt")


if __name__ == "__main__":
    main()
