# docker build -t credit_dp .                          for CPUs
# docker build -t credit_dp --build-arg DEVICE=cuda .  for NVIDIA GPUs, with torch's own CUDA
# docker build --target check .                        trains the quickstart for some seconds
ARG PYTHON=3.13
FROM python:${PYTHON}-slim AS base
ARG DEVICE=cpu
# torch from PyPI brings CUDA; its own index has a build for CPUs, a tenth of the size.
RUN if [ "$DEVICE" = cpu ]; then \
      pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu; \
    else \
      pip install --no-cache-dir torch; \
    fi
COPY . /src
RUN pip install --no-cache-dir '/src[fast,remote,grib]' && rm -r /src
RUN useradd --create-home credit
USER credit
WORKDIR /home/credit
ENV WANDB_MODE=offline

FROM base AS check
RUN credit-dp train experiment=fast parallel.domain=2

FROM base
ENTRYPOINT ["credit-dp"]
CMD ["--help"]
