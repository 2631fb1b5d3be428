"""The messages of Caffe's files: names, types, numbers and defaults of their fields, as protobuf descriptors.

A line of the table is `MessageName` and its fields; a field is `name=number:type`, with `*` behind the type if it is
repeated, `+` if it is repeated and packed, and a default behind another `=`. Enumerations are lists of `NAME=value`.

Large arrays of numbers are read through a second set of messages, in which the packed floats of a blob are bytes. On
the wire both are the same, and bytes become an array without a Python object for every number.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tether.errors import missing_extra

ENUMS = {
    "Phase": "TRAIN=0 TEST=1",
    "VarianceNorm": "FAN_IN=0 FAN_OUT=1 AVERAGE=2",
    "SnapshotFormat": "HDF5=0 BINARYPROTO=1",
    "SolverMode": "CPU=0 GPU=1",
    "SolverType": "SGD=0 NESTEROV=1 ADAGRAD=2 RMSPROP=3 ADADELTA=4 ADAM=5",
    "DimCheckMode": "STRICT=0 PERMISSIVE=1",
    "NormalizationMode": "FULL=0 VALID=1 BATCH_SIZE=2 NONE=3",
    "Engine": "DEFAULT=0 CAFFE=1 CUDNN=2",
    "DB": "LEVELDB=0 LMDB=1",
    "EltwiseOp": "PROD=0 SUM=1 MAX=2",
    "Norm": "L1=1 L2=2",
    "NormRegion": "ACROSS_CHANNELS=0 WITHIN_CHANNEL=1",
    "PoolMethod": "MAX=0 AVE=1 STOCHASTIC=2",
    "RoundMode": "CEIL=0 FLOOR=1",
    "ReductionOp": "SUM=1 ASUM=2 SUMSQ=3 MEAN=4",
    "LayerType": """NONE=0 ACCURACY=1 BNLL=2 CONCAT=3 CONVOLUTION=4 DATA=5 DROPOUT=6 EUCLIDEAN_LOSS=7 FLATTEN=8
        HDF5_DATA=9 HDF5_OUTPUT=10 IM2COL=11 IMAGE_DATA=12 INFOGAIN_LOSS=13 INNER_PRODUCT=14 LRN=15
        MULTINOMIAL_LOGISTIC_LOSS=16
        POOLING=17 RELU=18 SIGMOID=19 SOFTMAX=20 SOFTMAX_LOSS=21 SPLIT=22 TANH=23 WINDOW_DATA=24 ELTWISE=25 POWER=26
        SIGMOID_CROSS_ENTROPY_LOSS=27 HINGE_LOSS=28 MEMORY_DATA=29 ARGMAX=30 THRESHOLD=31 DUMMY_DATA=32 SLICE=33 MVN=34
        ABSVAL=35 SILENCE=36 CONTRASTIVE_LOSS=37 EXP=38 DECONVOLUTION=39""",
}

MESSAGES = """
BlobShape dim=1:int64+
BlobProto shape=7:BlobShape data=5:float+ diff=6:float+ double_data=8:double+ double_diff=9:double+ num=1:int32=0
    channels=2:int32=0 height=3:int32=0 width=4:int32=0
BlobProtoVector blobs=1:BlobProto*
Datum channels=1:int32 height=2:int32 width=3:int32 data=4:bytes label=5:int32 float_data=6:float* encoded=7:bool=false
FillerParameter type=1:string=constant value=2:float=0 min=3:float=0 max=4:float=1 mean=5:float=0 std=6:float=1
    sparse=7:int32=-1 variance_norm=8:VarianceNorm=FAN_IN
NetParameter name=1:string input=3:string* input_shape=8:BlobShape* input_dim=4:int32* force_backward=5:bool=false
    state=6:NetState debug_info=7:bool=false layer=100:LayerParameter* layers=2:V1LayerParameter*
SolverParameter net=24:string net_param=25:NetParameter train_net=1:string test_net=2:string*
    train_net_param=21:NetParameter test_net_param=22:NetParameter* train_state=26:NetState test_state=27:NetState*
    test_iter=3:int32* test_interval=4:int32=0 test_compute_loss=19:bool=false test_initialization=32:bool=true
    base_lr=5:float display=6:int32 average_loss=33:int32=1 max_iter=7:int32 iter_size=36:int32=1 lr_policy=8:string
    gamma=9:float power=10:float momentum=11:float weight_decay=12:float regularization_type=29:string=L2
    stepsize=13:int32 stepvalue=34:int32* clip_gradients=35:float=-1 snapshot=14:int32=0 snapshot_prefix=15:string
    snapshot_diff=16:bool=false snapshot_format=37:SnapshotFormat=BINARYPROTO solver_mode=17:SolverMode=GPU
    device_id=18:int32=0 random_seed=20:int64=-1 type=40:string=SGD delta=31:float=1e-08 momentum2=39:float=0.999
    rms_decay=38:float=0.99 debug_info=23:bool=false snapshot_after_train=28:bool=true solver_type=30:SolverType=SGD
    layer_wise_reduce=41:bool=true weights=42:string*
SolverState iter=1:int32 learned_net=2:string history=3:BlobProto* current_step=4:int32=0
NetState phase=1:Phase=TEST level=2:int32=0 stage=3:string*
NetStateRule phase=1:Phase min_level=2:int32 max_level=3:int32 stage=4:string* not_stage=5:string*
ParamSpec name=1:string share_mode=2:DimCheckMode lr_mult=3:float=1 decay_mult=4:float=1
LayerParameter name=1:string type=2:string bottom=3:string* top=4:string* phase=10:Phase loss_weight=5:float*
    param=6:ParamSpec* blobs=7:BlobProto* propagate_down=11:bool* include=8:NetStateRule* exclude=9:NetStateRule*
    transform_param=100:TransformationParameter loss_param=101:LossParameter accuracy_param=102:AccuracyParameter
    argmax_param=103:ArgMaxParameter batch_norm_param=139:BatchNormParameter bias_param=141:BiasParameter
    clip_param=148:ClipParameter concat_param=104:ConcatParameter contrastive_loss_param=105:ContrastiveLossParameter
    convolution_param=106:ConvolutionParameter crop_param=144:CropParameter data_param=107:DataParameter
    dropout_param=108:DropoutParameter dummy_data_param=109:DummyDataParameter eltwise_param=110:EltwiseParameter
    elu_param=140:ELUParameter embed_param=137:EmbedParameter exp_param=111:ExpParameter
    flatten_param=135:FlattenParameter hdf5_data_param=112:HDF5DataParameter hdf5_output_param=113:HDF5OutputParameter
    hinge_loss_param=114:HingeLossParameter image_data_param=115:ImageDataParameter
    infogain_loss_param=116:InfogainLossParameter inner_product_param=117:InnerProductParameter
    input_param=143:InputParameter log_param=134:LogParameter lrn_param=118:LRNParameter
    memory_data_param=119:MemoryDataParameter mvn_param=120:MVNParameter parameter_param=145:ParameterParameter
    pooling_param=121:PoolingParameter power_param=122:PowerParameter prelu_param=131:PReLUParameter
    python_param=130:PythonParameter recurrent_param=146:RecurrentParameter reduction_param=136:ReductionParameter
    relu_param=123:ReLUParameter reshape_param=133:ReshapeParameter scale_param=142:ScaleParameter
    sigmoid_param=124:SigmoidParameter softmax_param=125:SoftmaxParameter spp_param=132:SPPParameter
    slice_param=126:SliceParameter swish_param=147:SwishParameter tanh_param=127:TanHParameter
    threshold_param=128:ThresholdParameter tile_param=138:TileParameter window_data_param=129:WindowDataParameter
TransformationParameter scale=1:float=1 mirror=2:bool=false crop_size=3:uint32=0 mean_file=4:string mean_value=5:float*
    force_color=6:bool=false force_gray=7:bool=false
LossParameter ignore_label=1:int32 normalization=3:NormalizationMode=VALID normalize=2:bool
AccuracyParameter top_k=1:uint32=1 axis=2:int32=1 ignore_label=3:int32
ArgMaxParameter out_max_val=1:bool=false top_k=2:uint32=1 axis=3:int32
ClipParameter min=1:float max=2:float
ConcatParameter axis=2:int32=1 concat_dim=1:uint32=1
BatchNormParameter use_global_stats=1:bool moving_average_fraction=2:float=0.999 eps=3:float=1e-05
BiasParameter axis=1:int32=1 num_axes=2:int32=1 filler=3:FillerParameter
ContrastiveLossParameter margin=1:float=1 legacy_version=2:bool=false
ConvolutionParameter num_output=1:uint32 bias_term=2:bool=true pad=3:uint32* kernel_size=4:uint32* stride=6:uint32*
    dilation=18:uint32* pad_h=9:uint32=0 pad_w=10:uint32=0 kernel_h=11:uint32 kernel_w=12:uint32 stride_h=13:uint32
    stride_w=14:uint32 group=5:uint32=1 weight_filler=7:FillerParameter bias_filler=8:FillerParameter
    engine=15:Engine=DEFAULT axis=16:int32=1 force_nd_im2col=17:bool=false
CropParameter axis=1:int32=2 offset=2:uint32*
DataParameter source=1:string batch_size=4:uint32 rand_skip=7:uint32=0 backend=8:DB=LEVELDB scale=2:float=1
    mean_file=3:string crop_size=5:uint32=0 mirror=6:bool=false force_encoded_color=9:bool=false prefetch=10:uint32=4
DropoutParameter dropout_ratio=1:float=0.5
DummyDataParameter data_filler=1:FillerParameter* shape=6:BlobShape* num=2:uint32* channels=3:uint32* height=4:uint32*
    width=5:uint32*
EltwiseParameter operation=1:EltwiseOp=SUM coeff=2:float* stable_prod_grad=3:bool=true
ELUParameter alpha=1:float=1
EmbedParameter num_output=1:uint32 input_dim=2:uint32 bias_term=3:bool=true weight_filler=4:FillerParameter
    bias_filler=5:FillerParameter
ExpParameter base=1:float=-1 scale=2:float=1 shift=3:float=0
FlattenParameter axis=1:int32=1 end_axis=2:int32=-1
HDF5DataParameter source=1:string batch_size=2:uint32 shuffle=3:bool=false
HDF5OutputParameter file_name=1:string
HingeLossParameter norm=1:Norm=L1
ImageDataParameter source=1:string batch_size=4:uint32=1 rand_skip=7:uint32=0 shuffle=8:bool=false new_height=9:uint32=0
    new_width=10:uint32=0 is_color=11:bool=true scale=2:float=1 mean_file=3:string crop_size=5:uint32=0
    mirror=6:bool=false root_folder=12:string
InfogainLossParameter source=1:string axis=2:int32=1
InnerProductParameter num_output=1:uint32 bias_term=2:bool=true weight_filler=3:FillerParameter
    bias_filler=4:FillerParameter axis=5:int32=1 transpose=6:bool=false
InputParameter shape=1:BlobShape*
LogParameter base=1:float=-1 scale=2:float=1 shift=3:float=0
LRNParameter local_size=1:uint32=5 alpha=2:float=1 beta=3:float=0.75 norm_region=4:NormRegion=ACROSS_CHANNELS
    k=5:float=1 engine=6:Engine=DEFAULT
MemoryDataParameter batch_size=1:uint32 channels=2:uint32 height=3:uint32 width=4:uint32
MVNParameter normalize_variance=1:bool=true across_channels=2:bool=false eps=3:float=1e-09
ParameterParameter shape=1:BlobShape
PoolingParameter pool=1:PoolMethod=MAX pad=4:uint32=0 pad_h=9:uint32=0 pad_w=10:uint32=0 kernel_size=2:uint32
    kernel_h=5:uint32 kernel_w=6:uint32 stride=3:uint32=1 stride_h=7:uint32 stride_w=8:uint32 engine=11:Engine=DEFAULT
    global_pooling=12:bool=false round_mode=13:RoundMode=CEIL
PowerParameter power=1:float=1 scale=2:float=1 shift=3:float=0
PReLUParameter filler=1:FillerParameter channel_shared=2:bool=false
PythonParameter module=1:string layer=2:string param_str=3:string share_in_parallel=4:bool=false
RecurrentParameter num_output=1:uint32=0 weight_filler=2:FillerParameter bias_filler=3:FillerParameter
    debug_info=4:bool=false expose_hidden=5:bool=false
ReductionParameter operation=1:ReductionOp=SUM axis=2:int32=0 coeff=3:float=1
ReLUParameter negative_slope=1:float=0 engine=2:Engine=DEFAULT
ReshapeParameter shape=1:BlobShape axis=2:int32=0 num_axes=3:int32=-1
ScaleParameter axis=1:int32=1 num_axes=2:int32=1 filler=3:FillerParameter bias_term=4:bool=false
    bias_filler=5:FillerParameter
SigmoidParameter engine=1:Engine=DEFAULT
SliceParameter axis=3:int32=1 slice_point=2:uint32* slice_dim=1:uint32=1
SoftmaxParameter engine=1:Engine=DEFAULT axis=2:int32=1
SPPParameter pyramid_height=1:uint32 pool=2:PoolMethod=MAX engine=6:Engine=DEFAULT
SwishParameter beta=1:float=1
TanHParameter engine=1:Engine=DEFAULT
ThresholdParameter threshold=1:float=0
TileParameter axis=1:int32=1 tiles=2:int32
WindowDataParameter source=1:string scale=2:float=1 mean_file=3:string batch_size=4:uint32 crop_size=5:uint32=0
    mirror=6:bool=false fg_threshold=7:float=0.5 bg_threshold=8:float=0.5 fg_fraction=9:float=0.25
    context_pad=10:uint32=0 crop_mode=11:string=warp cache_images=12:bool=false root_folder=13:string
V0LayerParameter name=1:string type=2:string num_output=3:uint32 biasterm=4:bool=true weight_filler=5:FillerParameter
    bias_filler=6:FillerParameter pad=7:uint32=0 kernelsize=8:uint32 group=9:uint32=1 stride=10:uint32=1
    pool=11:PoolMethod=MAX dropout_ratio=12:float=0.5 local_size=13:uint32=5 alpha=14:float=1 beta=15:float=0.75
    k=22:float=1 source=16:string scale=17:float=1 meanfile=18:string batchsize=19:uint32 cropsize=20:uint32=0
    mirror=21:bool=false blobs=50:BlobProto* blobs_lr=51:float* weight_decay=52:float* rand_skip=53:uint32=0
    det_fg_threshold=54:float=0.5 det_bg_threshold=55:float=0.5 det_fg_fraction=56:float=0.25
    det_context_pad=58:uint32=0 det_crop_mode=59:string=warp new_num=60:int32=0 new_channels=61:int32=0
    new_height=62:int32=0 new_width=63:int32=0 shuffle_images=64:bool=false concat_dim=65:uint32=1
    hdf5_output_param=1001:HDF5OutputParameter
V1LayerParameter layer=1:V0LayerParameter bottom=2:string* top=3:string* name=4:string include=32:NetStateRule*
    exclude=33:NetStateRule* type=5:LayerType blobs=6:BlobProto* param=1001:string*
    blob_share_mode=1002:DimCheckMode* blobs_lr=7:float* weight_decay=8:float* loss_weight=35:float*
    accuracy_param=27:AccuracyParameter argmax_param=23:ArgMaxParameter concat_param=9:ConcatParameter
    contrastive_loss_param=40:ContrastiveLossParameter convolution_param=10:ConvolutionParameter
    data_param=11:DataParameter dropout_param=12:DropoutParameter dummy_data_param=26:DummyDataParameter
    eltwise_param=24:EltwiseParameter exp_param=41:ExpParameter hdf5_data_param=13:HDF5DataParameter
    hdf5_output_param=14:HDF5OutputParameter hinge_loss_param=29:HingeLossParameter
    image_data_param=15:ImageDataParameter infogain_loss_param=16:InfogainLossParameter
    inner_product_param=17:InnerProductParameter lrn_param=18:LRNParameter memory_data_param=22:MemoryDataParameter
    mvn_param=34:MVNParameter pooling_param=19:PoolingParameter power_param=21:PowerParameter
    relu_param=30:ReLUParameter sigmoid_param=38:SigmoidParameter softmax_param=39:SoftmaxParameter
    slice_param=31:SliceParameter tanh_param=37:TanHParameter threshold_param=25:ThresholdParameter
    window_data_param=20:WindowDataParameter transform_param=36:TransformationParameter loss_param=42:LossParameter
"""

#: what each type of Caffe's first layer syntax is called in the second
V1_TYPES = {
    "ABSVAL": "AbsVal",
    "ACCURACY": "Accuracy",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "CONCAT": "Concat",
    "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "CONVOLUTION": "Convolution",
    "DATA": "Data",
    "DECONVOLUTION": "Deconvolution",
    "DROPOUT": "Dropout",
    "DUMMY_DATA": "DummyData",
    "ELTWISE": "Eltwise",
    "EUCLIDEAN_LOSS": "EuclideanLoss",
    "EXP": "Exp",
    "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "HINGE_LOSS": "HingeLoss",
    "IM2COL": "Im2col",
    "IMAGE_DATA": "ImageData",
    "INFOGAIN_LOSS": "InfogainLoss",
    "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN",
    "MEMORY_DATA": "MemoryData",
    "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "MVN": "MVN",
    "POOLING": "Pooling",
    "POWER": "Power",
    "RELU": "ReLU",
    "SIGMOID": "Sigmoid",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
    "SILENCE": "Silence",
    "SLICE": "Slice",
    "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "SPLIT": "Split",
    "TANH": "TanH",
    "THRESHOLD": "Threshold",
    "WINDOW_DATA": "WindowData",
}

#: the types of Caffe's oldest syntax, today's, and the messages of their settings
V0_TYPES = {
    "accuracy": ("Accuracy", ""),
    "bnll": ("BNLL", ""),
    "concat": ("Concat", "concat_param"),
    "conv": ("Convolution", "convolution_param"),
    "data": ("Data", "data_param"),
    "dropout": ("Dropout", "dropout_param"),
    "euclidean_loss": ("EuclideanLoss", ""),
    "flatten": ("Flatten", ""),
    "hdf5_data": ("HDF5Data", "hdf5_data_param"),
    "hdf5_output": ("HDF5Output", ""),
    "im2col": ("Im2col", ""),
    "images": ("ImageData", "image_data_param"),
    "infogain_loss": ("InfogainLoss", "infogain_loss_param"),
    "innerproduct": ("InnerProduct", "inner_product_param"),
    "lrn": ("LRN", "lrn_param"),
    "multinomial_logistic_loss": ("MultinomialLogisticLoss", ""),
    "pool": ("Pooling", "pooling_param"),
    "relu": ("ReLU", ""),
    "sigmoid": ("Sigmoid", ""),
    "softmax": ("Softmax", ""),
    "softmax_loss": ("SoftmaxWithLoss", ""),
    "split": ("Split", ""),
    "tanh": ("TanH", ""),
    "window_data": ("WindowData", "window_data_param"),
}

#: what settings of the oldest syntax are called today, in transform_param or in the message of a layer's settings
V0_TRANSFORMS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
V0_NAMES = {
    "biasterm": "bias_term",
    "kernelsize": "kernel_size",
    "batchsize": "batch_size",
    "shuffle_images": "shuffle",
    "det_fg_threshold": "fg_threshold",
    "det_bg_threshold": "bg_threshold",
    "det_fg_fraction": "fg_fraction",
    "det_context_pad": "context_pad",
    "det_crop_mode": "crop_mode",
}

#: the packed arrays of a blob, which the second set of messages has as bytes
_ARRAYS = ("data", "diff", "double_data", "double_diff")


def message(name: str, *, raw: bool = False) -> Any:
    """A new, empty message; with `raw`, arrays of blobs are lists of bytes."""
    return _classes(raw)[name]()


def enum_name(enum: str, value: int) -> str:
    """The name of a value of an enumeration."""
    return {int(number): name for name, number in _values(enum)}.get(value, str(value))


def _values(enum: str) -> list[tuple[str, str]]:
    return [(name, number) for name, number in (item.split("=") for item in ENUMS[enum].split())]


@cache
def _classes(raw: bool) -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise missing_extra("protobuf", "caffe") from None
    field_types = descriptor_pb2.FieldDescriptorProto
    package = "tether.caffe.raw" if raw else "tether.caffe"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for enum in ENUMS:
        # an enumeration is inside a message of its own, since the names of its values are global otherwise
        described = file.message_type.add(name=f"{enum}Enum").enum_type.add(name=enum)
        for name, number in _values(enum):
            described.value.add(name=name, number=int(number))
    tables = [line.split() for line in MESSAGES.strip().replace("\n    ", " ").splitlines()]
    for name, *fields in tables:
        table = file.message_type.add(name=name)
        for field in fields:
            text, _, default = field.partition(":")[2].partition("=")
            field_name, _, number = field.partition(":")[0].partition("=")
            kind = text.rstrip("*+")
            if raw and name == "BlobProto" and field_name in _ARRAYS:
                text, kind = "bytes*", "bytes"
            added = table.field.add(name=field_name, number=int(number))
            added.label = field_types.LABEL_REPEATED if text != kind else field_types.LABEL_OPTIONAL
            if text.endswith("+"):
                added.options.packed = True
            if kind in ENUMS:
                added.type, added.type_name = field_types.TYPE_ENUM, f".{package}.{kind}Enum.{kind}"
            elif kind[0].isupper():
                added.type, added.type_name = field_types.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                added.type = getattr(field_types, f"TYPE_{kind.upper()}")
            if default:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name, *_ in tables
    }
