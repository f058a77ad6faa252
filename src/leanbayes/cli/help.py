"""One screen of help for the commands with many flags. It is plain text, so that help needs no torch.

`--help-all` prints every flag with its default, from the dataclasses.
"""

from __future__ import annotations

PURPOSE = {
    "compare": "Train methods on one data set and network, evaluate them alike, write a table and OUT/report.html.",
    "train": "Only train the methods of a comparison; leanbayes evaluate with the same flags evaluates them.",
    "evaluate": "Only evaluate trained methods; give the flags of leanbayes train. --fresh evaluates again.",
}

SCREEN = """usage: leanbayes {command} [--FLAG VALUE ...]        every flag: leanbayes {command} --help-all

{purpose}

data
  --data DATA           a known name (leanbayes list data), .npz, a table, or a folder with images
                        train/CLASS/*.png, test/CLASS/*.png; default digits
  --target COLUMN       column of a table to predict, default the last; --drop LIST of columns
  --group COLUMN        whose groups are not split; --time COLUMN, the latest rows are the test rows
  --task TASK           classification or regression, for your own data; default by its targets
  --train-rows N        number of training rows, --test-images N of test rows; 0 is all
  --hold-out N          evaluate on N training rows instead of the test set, to choose settings
  --validation SHARE    of the training rows, which give temperature, noise and, for tables, the
                        epochs; default 0.1; 0 trains on all rows
methods and network
  --methods LIST        such as plain,rank1,patch[crossed=true]; default all (list methods)
  --net NET             a known name (leanbayes list nets), or your own as package.module:function
  --where GLOBS         layers to convert, such as "head*"; --late SHARE of the epochs before that
training
  --budget BUDGET       quick (default, minutes), short (an hour on two cores), full (as in papers)
  --seeds LIST          default 0,1,2 for quick and short, 0 for full; one seed recommends nothing
  --recipe.FIELD VALUE  such as --recipe.epochs 30, --recipe.lr 0.05, --recipe.batch-size 64
  --METHOD.FIELD VALUE  such as --rank1.components 8

  epochs by budget            quick   short   full      rate   batch
  images, 5,000 rows or more  3       15      60        0.05   128
  images, fewer rows          40      120     300       0.1    32
  images with augmentation    10      40      250       0.2    256    full: rate 0.1, batch 128
  series                      4       6       8         0.002  128
  steps by budget             quick   short   full      rate   batch
  tables                      20,000  60,000  200,000   0.003  32     at most 500 epochs
  tables, --validation 0      1,500   6,000   40,000    0.01   32     (batch 128 from 2,000 rows on)
  A table trains until its held-out rows have not improved for 30 epochs.

evaluation
  --samples N           draws per prediction; default 16
  --ood LIST            out-of-distribution sets; none for none; default the usual ones for the data
  --no-shift            leave out corrupted images; --shift-images N, default 1000
machine and results
  --out FOLDER          default runs/DATA. Finished runs are kept, others resume; or --fresh
  --workers N           runs at a time, each a process with one thread; --backend local or ray
  --device DEVICE       auto, cpu, cuda or mps; --devices N processes; --precision bf16-mixed
  --log LOGGER          csv, tensorboard, wandb or mlflow; history.jsonl is written in any case

  leanbayes {command} --data houses.csv --target price
  leanbayes {command} --data my.npz --net my_module:make_network --methods plain,rank1,implicit
"""


def screen(command: str) -> str | None:
    """Return the help of a command in one screen; None if the parser's own help is short enough."""
    purpose = PURPOSE.get(command)
    return None if purpose is None else SCREEN.format(command=command, purpose=purpose)
