"""NumPy multiplies matrices with one thread in tests: processors have a test each, and threads that wait for a turn burn them.

Imported before NumPy, which reads it once; what a test starts inherits it. Tests of bits are run with several threads as well.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
