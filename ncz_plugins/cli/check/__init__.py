"""What `ncz check FILE --model SPEC` tells: what each parameter of a model would get.

model       the model that SPEC means, built without memory for its weights where possible
treatments  what each of its parameters gets, and what that comes to
table       what people see
"""
