"""``ampctx migrate``: rewrites apex imports to ampctx, or an O1 loop to torch.amp. Needs libcst.

``cli`` and ``report`` can be imported without libcst.
"""
