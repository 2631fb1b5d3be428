"""Write what Caffe's own tools make of the pictures here: databases, their mean, and what its solver learns from them.

Run it where Caffe's tools and its Python are installed.
"""

import json
import os
import shutil
import subprocess
import sys

import caffe
import numpy as np

os.chdir(os.path.dirname(os.path.abspath(__file__)))
size = ["-resize_height=18", "-resize_width=16"]
for backend, encoded in (("lmdb", ["-encoded", "-encode_type=jpg"]), ("leveldb", [])):
    shutil.rmtree(backend, ignore_errors=True)
    command = ["convert_imageset", *encoded, *size, "-backend=" + backend, "pictures/", "pictures.txt", backend]
    subprocess.run(command, check=True)
subprocess.run(["compute_image_mean", "-backend=lmdb", "lmdb", "mean.binaryproto"], check=True)


def alone(work, *arguments):
    """Do it in a process of its own, since a LevelDB can be open in one at a time."""
    child = os.fork()
    if not child:
        work(*arguments)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{work.__name__}{arguments} failed")


def first():
    caffe.Net("net.prototxt", caffe.TRAIN).save("first.caffemodel")


def learn(name):
    solver = caffe.get_solver(name + ".prototxt")
    solver.net.copy_from("first.caffemodel")
    solver.solve()
    blobs = solver.test_nets[0].forward()
    with open(name + ".json", "w") as file:
        json.dump({blob: float(values) for blob, values in blobs.items()}, file)


def read():
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.forward()
    np.savez_compressed("pictures.npz", data=net.blobs["data"].data, label=net.blobs["label"].data)


alone(first)
alone(learn, "solver")
alone(learn, "solver_hdf5")
alone(read)
for name in os.listdir("leveldb"):
    if name.startswith("LO"):
        os.remove(os.path.join("leveldb", name))
os.remove("lmdb/lock.mdb")
