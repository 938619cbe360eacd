"""Whether steps may keep what they know from one to the next."""

import os

# With AMPCTX_PLAN=0 the plain code runs: each step makes its op calls anew, and each block unscales into fp32
# gradients. Weights, masters and state get the same bits, unless a norm over 16-bit and fp32 weights scales them: it is
# joined of two norms where 16-bit gradients wait. ``make test-plain`` runs the tests.
PLANS = os.environ.get("AMPCTX_PLAN", "1") != "0"
