"""``ampctx-apex migrate``: moves apex's names in source files to ampctx's. Needs libcst, but no torch."""
