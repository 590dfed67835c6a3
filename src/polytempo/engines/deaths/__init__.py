"""The first failure of a run, named in one line: which process, where, and why?"""
