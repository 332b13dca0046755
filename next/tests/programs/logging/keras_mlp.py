"""Keras 3 on torch: `model.fit` with validation, and a callback that writes for TensorBoard."""

import json
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from torch.utils.tensorboard import SummaryWriter

keras.utils.set_random_seed(0)
x = np.random.rand(200, 8).astype("float32")
y = (x.sum(axis=1) > 4).astype("int32")

model = keras.Sequential(
    [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2, activation="softmax")]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
writer = SummaryWriter("runs")


class Summaries(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for name, value in logs.items():
            writer.add_scalar(f"epoch/{name}", value, epoch)
        writer.add_scalar("weights", sum(np.square(w).sum() for w in self.model.get_weights()), epoch)


history = model.fit(x, y, batch_size=32, epochs=4, validation_split=0.2, verbose=0, callbacks=[Summaries()])
model.evaluate(x, y, verbose=0)
if os.environ["RANK"] == "0":
    with open("history.json", "w") as file:
        json.dump(history.history, file)
