"""apex.amp's private state as views on the default session: what its modules in ``compat/modules`` give their names to.

Each class says by ``__module__`` where apex has it, which is what pickles name.
"""
