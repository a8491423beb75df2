"""Reference kernels in plain torch: one file an operation.

On CPU a row's result must not depend on which other rows are computed with it; otherwise a token could change with the
batch its sequence happens to share. MKL's "strict" conditional numerical reproducibility gives exactly that for matrix
products (the same bits for any number of rows and threads; oneMKL Developer Guide, "Obtaining Numerically Reproducible
Results"), and costs nothing from four rows up. MKL reads the variable at its first product, so it is set here, before
any kernel can run.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
