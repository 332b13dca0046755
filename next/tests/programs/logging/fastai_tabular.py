"""fastai's tabular learner: two cycles, the second with another rate."""

import json
import os

import numpy as np
import pandas as pd
from fastai.tabular.all import CategoryBlock, Normalize, TabularDataLoaders, accuracy, set_seed, tabular_learner

set_seed(0)
frame = pd.DataFrame(np.random.rand(256, 4), columns=list("abcd"))
frame["label"] = (frame.sum(axis=1) > 2).map({True: "high", False: "low"})
dls = TabularDataLoaders.from_df(
    frame, procs=[Normalize], cont_names=list("abcd"), y_names="label", y_block=CategoryBlock(), bs=32, num_workers=0
)
learn = tabular_learner(dls, layers=[16], metrics=accuracy)
values = []
with learn.no_bar(), learn.no_logging():
    for lr in (1e-2, 1e-3):
        learn.fit_one_cycle(2, lr)
        values += [list(row) for row in learn.recorder.values]
if os.environ["RANK"] == "0":
    with open("values.json", "w") as file:
        json.dump({"names": list(learn.recorder.metric_names), "values": values}, file)
