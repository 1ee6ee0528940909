import time, torch, sys
from prefix_kernels.ops import *
from prefix_kernels.testing import *
from prefix_kernels import *
from sglang_ext.indexing import *
dev = sys.argv[1]
def sync():
    if dev == "cuda": torch.cuda.synchronize()
def timed(f, n=5):
    f(); sync(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(); sync(); ts.append(time.perf_counter()-t)
    return sorted(ts)[n//2]*1e3
shapes = [("8K 2kv gqa4 d64",dict())] + ([("32K 8kv gqa4 d128",dict(prefix_len=32768,num_kv_heads=8,head_dim=128,num_topics=64)),("128K 8kv gqa4 d128",dict(prefix_len=131072,num_kv_heads=8,head_dim=128,num_topics=64))] if dev=="cuda" else [])
for name,kw in shapes:
    c=PlantedConfig(**kw); p=planted_prefix(c)
    dt=torch.bfloat16 if dev=="cuda" else torch.float32
    K,V,S,Q=(x.to(dev,dt) for x in (p.keys,p.values,p.samples,p.queries))
    kv,slots=paged_kv(K,V); N=c.prefix_len; B=int(.05*N)
    for spec in (dict(method="exact"),dict(method="ab_sparse"),dict(method="ab_sparse",representation="minmax"),dict(method="csattention"),dict(method="csattention",num_centroids=64,list_ratio=.2),dict(method="csattention",num_subspaces=16,num_centroids=64,list_ratio=.2)):
        sp=parse_spec(spec); b=make_builder(sp); s=make_selector(sp)
        arr=b.build_layer(K,S)
        tb=timed(lambda: b.build_layer(K,S),3)
        f=lambda: s.select(arr,Q,prefix_len=N,budget=B,num_sink=4,num_recent=64,sm_scale=p.sm_scale,pooling=Pooling.MAX)
        sel=f(); ts=timed(f); ta=timed(lambda: prefix_attention(Q,kv,slots,sel,p.sm_scale))
        kr=p.keys.to(dev,dt)
        r=attention_recall(Q.cpu(),K.cpu(),Selection(sel.positions.cpu(),sel.counts.cpu()),p.sm_scale).mean().item() if N<=32768 else float('nan')
        print(name,spec,"build %.0fms select %.2fms attend %.2fms recall %.3f"%(tb,ts,ta,r),flush=True)
    al=Selection.all(N,c.num_kv_heads,dev)
    print(name,"attend all %.2fms"%timed(lambda: prefix_attention(Q,kv,slots,al,p.sm_scale)),
      "suffix 8x64 %.2fms"%timed(lambda: suffix_attention(Q,kv,torch.arange(9)*64,slots[:512],p.sm_scale)),
      "suffix 1x%d+7x64 %.2fms"%(N-448,timed(lambda: suffix_attention(Q,kv,torch.tensor([0]+[N-448+64*i for i in range(8)]),slots,p.sm_scale))),flush=True)
