"""Task text: a linear model and a convolution that together classify texts."""

from tether.tasks.text.classifier import CLASSIFIER, Answer, Classifier, figures
from tether.tasks.text.encoder import Encoder
from tether.tasks.text.features import tokens
from tether.tasks.text.task import HELD_OUT, Text

__all__ = ["CLASSIFIER", "HELD_OUT", "Answer", "Classifier", "Encoder", "Text", "figures", "tokens"]
