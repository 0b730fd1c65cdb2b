"""Calls that pyright allows, and calls that it refuses. They never run: `.ci/run types` checks them.

Each `ignore` below names the one complaint that is expected there, and pyright complains of an ignore without one. So
a wrong call that passes fails, as does a right one that does not.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import jax.numpy as jnp
import numpy as np

import mars_jax as mj


def right(target: mj.Pretrained, drafter: mj.drafters.LoadedDrafter, schema: dict) -> None:
    rule = mj.verify.mars(0.9)
    mj.generate(target, drafter, "Once", verify=rule, temperature=0.7, top_k=5, seed=3, max_new_tokens=8)
    mj.generate(target, "ngram", ["a", "b"], temperature=[0.0, 0.7], seed=np.arange(2), stop_tokens=[[1], []])
    mj.generate(
        target, prompts=[[1, 2]], stop_tokens=2, banned_tokens=[3], logit_bias={5: -1.0}, top_p=jnp.float32(1)
    )
    mj.generate(target, "ngram", ["a", "b"], choice=[["yes", "no"], None], json_schema=[None, schema])
    mj.generate(target, "ngram", "a", regex="a+", stop_strings="b", relax_in="think", relax_constrained=True)
    for index, completion in mj.generate_iter(target, "ngram", ["a"], samples=2, temperature=1.0, chat=True):
        print(index + 1, completion.text.upper())
    mj.generate_stream(target, "ngram", ["a"], batch_size=2, system="Be brief.", chat=True, ignore_eos=True)
    mj.make_requests(target, ["a"], max_new_tokens=4, chat=True)[0].prompt_tokens.count(0)
    mj.sharding.name_axes(data="fsdp")
    mj.Chat(target, "ngram", temperature=0.7, max_new_tokens=8).say("Hello").text.upper()


def right_steps(decoder: mj.Decoder, params: mj.Params, prompts: mj.Prompts) -> None:
    state = decoder.init(params, prompts)
    state, info = decoder.step(params, state)
    state = decoder.insert(params, state, jnp.asarray([0]), prompts)
    state, read = decoder.extend(params, state, prompts)
    state, stats = mj.run(decoder, params, state, record=True)
    for current, info in mj.stream(decoder, params, state):
        print(current.length, info.emitted, read, mj.summarize(stats).tau)


def wrong(target: mj.Pretrained, drafter: mj.drafters.LoadedDrafter) -> None:
    mj.generate(target, drafter, "Once", temprature=0.7)  # pyright: ignore[reportCallIssue]
    mj.generate(target, drafter, "Once", temperature="hot")  # pyright: ignore[reportArgumentType]
    mj.generate(target, drafter, "Once", batch_size="8")  # pyright: ignore[reportArgumentType]
    mj.generate(target, drafter, "Once", verify="mars")  # pyright: ignore[reportArgumentType]
    mj.generate("tiny/target", drafter, "Once")  # pyright: ignore[reportArgumentType]
    mj.generate(target, drafter, 5)  # pyright: ignore[reportArgumentType]
    mj.generate_iter(target, drafter, "Once", temprature=0.7)  # pyright: ignore[reportCallIssue]
    mj.generate_stream(target, drafter, "Once", chatt=True)  # pyright: ignore[reportCallIssue]
    mj.make_requests(target, "Once", batch_size=3)  # pyright: ignore[reportCallIssue]
    mj.Chat(target, drafter, samples=2)  # pyright: ignore[reportCallIssue]
    mj.genrate(target, drafter, "Once")  # pyright: ignore[reportAttributeAccessIssue]
    mj.constraints.regx("a")  # pyright: ignore[reportAttributeAccessIssue]
    mj.verify.mars(tehta=0.9)  # pyright: ignore[reportCallIssue]
    mj.load("tiny/target", dtypes="int8")  # pyright: ignore[reportCallIssue]


def wrong_steps(decoder: mj.Decoder, params: mj.Params, prompts: mj.Prompts, state: mj.DecodeState) -> None:
    decoder.init(1, 2, 3)  # pyright: ignore[reportCallIssue]
    decoder.step(state)  # pyright: ignore[reportCallIssue]
    decoder.step(params, prompts)  # pyright: ignore[reportArgumentType]
    _ = decoder.step(params, state).length  # pyright: ignore[reportAttributeAccessIssue]
    decoder.insert(params, state, prompts)  # pyright: ignore[reportCallIssue]
    decoder.insert(params, state, [0], prompts)  # pyright: ignore[reportArgumentType]
    decoder.extend(params, prompts, state)  # pyright: ignore[reportArgumentType]
    mj.speculative_decoder(decoder.target, "ngram", mj.verify.exact())  # pyright: ignore[reportArgumentType]
    mj.speculative_decoder(decoder.target, decoder.drafter, "mars")  # pyright: ignore[reportArgumentType]
    mj.decode.start(decoder, prompts, params)  # pyright: ignore[reportArgumentType]
    mj.make_controls(2, limt=8)  # pyright: ignore[reportCallIssue]
    mj.stream(decoder, params)  # pyright: ignore[reportCallIssue]
