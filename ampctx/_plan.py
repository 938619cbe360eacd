"""Whether steps may keep what they know from one to the next."""

import os

# With AMPCTX_PLAN=0 the plain code runs: each step makes its op calls anew, and each block unscales into fp32
# gradients. Weights, masters and state get the same bits; ``make test-plain`` runs their tests.
PLANS = os.environ.get("AMPCTX_PLAN", "1") != "0"
