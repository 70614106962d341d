"""Which of the library's operators a name of MindSpore's means.

``ARGUMENTS``: MindSpore's names, the library's name, and the library's names of the arguments in
MindSpore's order: those passed on by position, then, after ``|``, those passed on by name, with a
default that need not be passed; ``_`` for one that does not matter. ``*`` stands before the last
one where its entries may be passed one by one.
"""

_DIMS = "input | dim keepdim=False"

ARGUMENTS = (
    ("SumExt", "sum", "input | dim keepdim=False dtype"),
    ("DeprecatedSum", "sum", "input | dim dtype keepdim=False initial"),
    ("ReduceSum", "sum", "input | dim keepdim=False _"),
    ("MeanExt", "mean", "input | dim keepdim=False dtype"),
    ("DeprecatedMean ReduceMean", "mean", _DIMS),
    ("ProdExt", "prod", "input | dim keepdim=False dtype"),
    ("DeprecatedProd", "prod", "input | dim keepdim=False dtype"),
    ("ReduceProd", "prod", _DIMS),
    ("Max MaxDim", "max", _DIMS),
    ("Min MinDim", "min", _DIMS),
    ("ReduceMax AmaxExt", "amax", _DIMS),
    ("ReduceMin AminExt", "amin", _DIMS),
    ("DeprecatedArgmax ArgMaxExt", "argmax", _DIMS),
    ("DeprecatedArgmin ArgMinExt", "argmin", _DIMS),
    ("Any ReduceAny", "any", _DIMS),
    ("All ReduceAll", "all", _DIMS),
    ("LogSumExp", "logsumexp", "input dim | keepdim=False"),

    ("Reshape View", "reshape", "input *shape"),
    ("Transpose TransposeView DeprecatedTranspose", "permute", "input *dims"),
    ("TransposeExtView", "transpose", "input dim0 dim1"),
    ("TExt", "t", "input"),
    ("ExpandDims ExpandDimsView", "unsqueeze", "input dim"),
    ("Squeeze", "squeeze", "input dim"),
    ("FlattenExt", "flatten", "input start_dim end_dim"),
    ("BroadcastTo BroadcastToView", "expand", "input *size"),
    ("Tile", "tile", "input *dims"),
    ("SplitTensor SplitTensorView SplitWithSize SplitWithSizeView", "split",
     "input split_size | dim"),
    ("Chunk ChunkView", "chunk", "input chunks | dim"),
    ("Narrow NarrowView", "narrow", "input dim start length"),
    ("SelectExtView", "select", "input dim index"),
    ("UnstackExtView", "unbind", "input | dim"),
    ("Split", "chunk", "input | dim chunks"),
    ("Concat", "cat", "tensors | dim"),
    ("StackExt", "stack", "tensors | dim"),
    ("Clone", "clone", "input"),
    ("StopGradient", "detach", "input"),

    ("AddExt", "add", "input other | alpha"),
    ("SubExt", "sub", "input other | alpha"),
    ("DivMod", "div", "input other | rounding_mode"),
    ("GeluExt", "gelu", "input | approximate=none"),
    ("MaskedFill MaskedFillScalar", "masked_fill", "input mask value"),
    ("ToDtype Cast", "to", "input dtype"),
    ("TypeAs", "type_as", "input other"),
    ("InplaceCopy Assign", "copy_", "input src"),
    ("InplaceAddExt InplaceAddsExt AssignAdd", "add_", "input other | alpha"),
    ("InplaceSubExt InplaceSubScalar AssignSub", "sub_", "input other | alpha"),
    ("InplaceMul InplaceMuls", "mul_", "input other"),
    ("InplaceDiv InplaceDivs", "div_", "input other"),
    ("InplaceZero", "zero_", "input"),
    ("InplaceFillScalar InplaceFillTensor", "fill_", "input value"),

    ("MatMulExt Mm BatchMatMulExt", "matmul", "input other"),
    ("Dense", "linear", "input weight bias"),
    ("Softmax", "softmax", "input | dim"),
    ("LogSoftmax LogSoftmaxExt", "log_softmax", "input | dim"),
    ("LayerNormExt", "native_layer_norm", "input normalized_shape weight bias | eps"),
    ("Embedding", "embedding", "input weight padding_idx"),
    ("FuncDropoutExt DropoutExt", "dropout", "input | p training _ _ _"),
    ("GatherD", "gather", "input dim index"),
    ("IndexSelect", "index_select", "input dim index"),
    ("CumsumExt", "cumsum", "input | dim dtype"),
    ("TopkExt", "topk", "input k | dim largest sorted"),
    ("SortExt", "sort", "input | dim descending stable"),
    ("TrilExt Tril", "tril", "input | diagonal"),
    ("Triu", "triu", "input | diagonal"),
    ("ZerosLike ZerosLikeExt", "zeros_like", "input | dtype"),
    ("OnesLike OnesLikeExt", "ones_like", "input | dtype"),
    ("FullLike", "full_like", "input fill_value | dtype _"),
    ("RandLikeExt", "rand_like", "input | _ _ dtype _"),
    ("RandnLike", "randn_like", "input | _ _ dtype _"),
    ("RandIntLike", "randint_like", "input low high | _ _ dtype _"),
    ("BernoulliExt", "bernoulli", "input | _ _"),
    ("Bernoulli", "bernoulli", "input p"),
    ("Elu EluExt", "elu", "input alpha"),
    ("LeakyReLUExt", "leaky_relu", "input negative_slope"),
    ("OneHotExt", "one_hot", "input num_classes"),
    ("ConstantPadND", "pad", "input pad | value"),
    ("RmsNorm", "rms_norm_with_factor", "input weight | eps"),
    ("LinalgVectorNorm", "linalg_vector_norm", "input ord | dim keepdim=False dtype"),
    ("MSELossExt", "mse_loss", "input target | reduction=mean"),
    ("L1LossExt", "l1_loss", "input target | reduction=mean"),
)

# Operators that treat every element alike and whose arguments stand as in the library.
RENAMED = dict(pair.split(":") for pair in """
    Add:add AddScalar:add Sub:sub SubScalar:sub Mul:mul Muls:mul Div:div Divs:div RealDiv:div
    FloorDiv:floor_divide RemainderTensorScalar:remainder RemainderTensorTensor:remainder
    Pow:pow PowTensorScalar:pow PowScalarTensor:pow Neg:neg Abs:abs Exp:exp Expm1:expm1 Log:log
    Log1p:log1p Log2:log2 Log10:log10 Sqrt:sqrt Rsqrt:rsqrt Square:square Reciprocal:reciprocal
    Sin:sin Cos:cos Tan:tan Asin:asin Acos:acos Atan:atan Atan2:atan2 Sinh:sinh Cosh:cosh
    Tanh:tanh Asinh:asinh Acosh:acosh Atanh:atanh Erf:erf Erfc:erfc Erfinv:erfinv
    Sigmoid:sigmoid ReLU:relu ReLU6:relu6 GeLU:gelu SiLU:silu
    Softplus:softplus SoftplusExt:softplus Softsign:softsign HSwish:hardswish HSigmoid:hardsigmoid
    Mish:mish SeLU:selu LogSigmoid:logsigmoid Floor:floor Ceil:ceil Round:round Trunc:trunc
    Sign:sign Maximum:maximum Minimum:minimum ClampScalar:clamp ClampTensor:clamp
    Equal:eq EqScalar:eq NotEqual:ne NeScalar:ne Greater:gt GreaterScalar:gt GreaterEqual:ge
    GreaterEqualScalar:ge Less:lt LessScalar:lt LessEqual:le LessEqualScalar:le
    LogicalNot:logical_not LogicalAnd:logical_and LogicalOr:logical_or LogicalXor:logical_xor
    BitwiseAndTensor:bitwise_and BitwiseAndScalar:bitwise_and BitwiseOrTensor:bitwise_or
    BitwiseOrScalar:bitwise_or BitwiseXorTensor:bitwise_xor BitwiseXorScalar:bitwise_xor
    BitwiseNot:bitwise_not IsFinite:isfinite IsInf:isinf IsNan:isnan NanToNum:nan_to_num
    Lerp:lerp LerpScalar:lerp Xlogy:xlogy Hypot:hypot
""".split())

# What is asked of the local tensor itself.
IGNORED = frozenset({"typeof"})

# They draw from generators of MindSpore that cannot be brought to agree between ranks.
DRAWING = frozenset("""
    RandomShuffle Dropout2D Dropout3D Multinomial MultinomialExt MultinomialWithReplacement
    InplaceUniform InplaceNormal InplaceRandom InplaceBernoulliScalar InplaceBernoulliTensor
    InplaceExponential NormalTensorFloat NormalFloatTensor NormalTensorTensor UniformExt
    StandardNormal StandardLaplace Gamma Poisson RandomPoisson RandomCategorical RReLU
""".split())
