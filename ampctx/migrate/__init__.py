"""``ampctx migrate`` (extra ``ampctx[migrate]``): moves code from apex's names to ampctx's, or an O1 loop to torch.amp.

Only ``cli`` and ``report`` can be imported without libcst.
"""
