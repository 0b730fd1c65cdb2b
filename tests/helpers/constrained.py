"""A vocabulary of a dozen tokens, with models and drafters over it, for tests of constraints."""

from mars_jax import constraints, drafters, fake

# Single letters and longer pieces. Tokens 0 and 1 have no text; 1 is the stop token.
PIECES = (None, None, b"a", b"b", b"c", b"ab", b"bc", b"abc", b" ", b"1", b"12", b"-")
VOCAB, STOP = len(PIECES), 1
VOCABULARY = constraints.Vocabulary(tokens=PIECES)
TARGET = fake.hash_model(vocab_size=VOCAB, seed=1, agree=0.6, scale=3.0)
DRAFT = fake.hash_model(vocab_size=VOCAB, seed=2, agree=0.6, scale=3.0)


def text_of(tokens):
    return b"".join(PIECES[t] or b"" for t in tokens).decode()


DRAFTERS = {
    "ngram": drafters.ngram(4),
    "chain": drafters.language_model(DRAFT, 4),
    "sampled chain": drafters.language_model(DRAFT, 4, sample=True),
    "static tree": drafters.language_model(DRAFT, tree=(3, 2, 1)),
    "sampled tree": drafters.language_model(DRAFT, tree=(2, 2), sample=True),
    "dynamic tree": drafters.language_model(DRAFT, tree=drafters.Dynamic(top_k=3, depth=3, nodes=8)),
}
