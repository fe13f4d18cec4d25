"""A norm, an addition and another norm in one pass: public function and op.

functional.py has the public function, and library.py the runner, the op and the derivative. Where
one pass is not served, the runner runs the two calls that the function stands for.
"""
