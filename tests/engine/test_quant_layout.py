"""The packed layout, and the reference product, against plain loops over single numbers."""

import random

import pytest
import torch

from engine.kernels.quantized_linear import (
    QuantizedEmbedding,
    QuantizedLinear,
    dequantize,
    embed,
    from_codes,
    int8_linear,
    linear,
    pack,
    unpack,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("bits", [4, 8])
def test_field_i_of_word_w_of_a_block_is_input_16_i_plus_w(bits):
    num_inputs, fields = 200, 32 // bits
    codes = torch.randint(0, 1 << bits, (3, num_inputs), dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.shape == (3, 256 // fields) and words.dtype == torch.int32
    for row in range(3):
        for k in range(num_inputs):
            block, inside = divmod(k, 16 * fields)
            field, word = divmod(inside, 16)
            value = int(words[row, block * 16 + word]) & 0xFFFFFFFF
            assert value >> (bits * field) & ((1 << bits) - 1) == int(codes[row, k])
    assert torch.equal(unpack(words, bits)[:, :num_inputs], codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_inputs", "group_size"), [(200, 128), (96, 32), (256, 256), (200, -1), (576, 64)])
def test_a_weight_is_code_less_zero_times_the_scale_of_its_group(bits, num_inputs, group_size):
    size = num_inputs if group_size == -1 else group_size
    codes = torch.randint(0, 1 << bits, (4, num_inputs), dtype=torch.uint8)
    groups = -(-num_inputs // size)
    scales, zeros = torch.rand(4, groups).half(), torch.randint(0, 1 << bits, (4, groups)).half()
    layer = from_codes(codes, scales, zeros, bits=bits, group_size=group_size)
    for weight, middle in ((dequantize(layer), None), (dequantize(_symmetric(codes, scales, bits, group_size)), 1)):
        for row in range(4):
            for k in range(0, num_inputs, 7):
                group = k // size
                zero = float(zeros[row, group]) if middle is None else float(1 << (bits - 1))
                expected = (int(codes[row, k]) - zero) * float(scales[row, group])
                assert float(weight[row, k]) == pytest.approx(expected, rel=1e-6)


def _symmetric(codes, scales, bits, group_size) -> QuantizedLinear:
    return from_codes(codes, scales, None, bits=bits, group_size=group_size)


def test_inputs_whose_groups_are_mixed_are_reordered_and_the_weight_is_not():
    groups = [k // 32 for k in range(128)]
    random.Random(1).shuffle(groups)
    codes = torch.randint(0, 16, (5, 128), dtype=torch.uint8)
    scales = torch.rand(5, 4).half()
    layer = from_codes(codes, scales, None, bits=4, group_size=32, groups=torch.tensor(groups))
    assert layer.permutation is not None
    expected = torch.tensor(
        [[(int(codes[n, k]) - 8) * float(scales[n, groups[k]]) for k in range(128)] for n in range(5)]
    )
    torch.testing.assert_close(dequantize(layer), expected)
    x = torch.randn(3, 128)
    torch.testing.assert_close(linear(x, layer), x @ expected.T)


def test_groups_of_unequal_size_are_refused():
    groups = torch.tensor([0] * 40 + [1] * 24)
    with pytest.raises(ValueError, match="32 inputs each"):
        from_codes(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2), None, bits=4, group_size=32, groups=groups)


@pytest.mark.parametrize("rows", [1, 20])
def test_w8a8_rounds_each_token_to_127_steps_and_multiplies_integers(rows):
    x = torch.randn(rows, 32) * torch.tensor([10.0 ** (i % 5 - 2) for i in range(rows)])[:, None]
    codes, scales = torch.randint(-127, 128, (8, 32), dtype=torch.int8), torch.rand(8) + 0.1
    bias = torch.randn(8)
    expected = torch.empty(rows, 8, dtype=torch.float64)
    for row in range(rows):
        step = max(abs(float(value)) for value in x[row]) / 127
        rounded = [round(float(value) / step) for value in x[row]]
        for out in range(8):
            total = sum(a * int(b) for a, b in zip(rounded, codes[out]))
            expected[row, out] = total * step * float(scales[out]) + float(bias[out])
    layer = QuantizedLinear("w8a8", 32, codes, scales, bias=bias)
    torch.testing.assert_close(int8_linear(x, layer).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear(x, layer).double(), expected, atol=1e-4, rtol=1e-4)


def test_an_int8_embedding_gives_codes_times_the_rows_scale():
    codes, scales = torch.tensor([[1, -2], [127, 0], [-127, 5]], dtype=torch.int8), torch.tensor([0.5, 2.0, 0.25])
    rows = embed(torch.tensor([2, 0]), QuantizedEmbedding(codes, scales, torch.float32))
    assert rows.tolist() == [[-31.75, 1.25], [0.5, -1.0]]
