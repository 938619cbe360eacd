"""apex.amp's private state as views on the default session. The modules in ``compat/modules`` re-export it.

Each class has apex's ``__module__``, so that pickles name it as apex does.
"""
