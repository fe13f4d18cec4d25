"""A norm, an addition and another norm in one pass: public function, op, and kernel call.

functional.py has the public function, library.py the op and its derivative, and cutile.py the
launch. Where one pass is not served, both run the two calls that the function stands for.
"""
