# A release image of SGLang with the plugin. The plugin changes no package of the image.
#   docker build -t sglang-ext .
#   docker build -t sglang-ext --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.23 --build-arg EXTRAS='[remote]' .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.16

FROM ${SGLANG_IMAGE} AS wheel
WORKDIR /src
COPY . .
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${SGLANG_IMAGE}
ARG EXTRAS=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=wheel /wheels /wheels
# What stands in the image stays as it is: a package that would have to change fails the build.
RUN python3 -m pip freeze --exclude-editable | grep '==' >/wheels/image.txt \
    && python3 -m pip install --no-cache-dir --constraint /wheels/image.txt "$(ls /wheels/*.whl)${EXTRAS}" \
    && rm -r /wheels \
    && mkdir -m 0700 /store \
    && sglang-ext --version
ENV SGLANG_SPARSE_ATTN_STORE=/store
VOLUME /store
EXPOSE 30000
