"""One module for each training framework. Each imports its framework, so nothing else in ampctx imports them."""
