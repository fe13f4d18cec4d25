class InterpreterError(RuntimeError):
    """A kernel did something that has an undefined result on a GPU, and that the compiler accepts:
    two blocks accessed one element without synchronisation, and one wrote it; a written array
    shares memory with another argument; an unchecked access is outside its array, or a whole tile
    is; PyTorch has yet to do something to an argument.
    """
