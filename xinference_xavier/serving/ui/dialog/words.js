// Our texts in the language of the page.

const WORDS = {
  en: {
    title: "Share KV cache between replicas (Xavier)",
    hint: "A replica copies a prefix that another one has computed, instead of computing it again.",
    alone: "A single replica shares nothing until another one is added.",
    options: "Sharing options",
    pool: "Pool size of one replica",
    poolDefault: "a tenth of the free memory",
    poolWrong: "Enter a number of bytes, or a size like 4GiB or 512MiB.",
    transport: "Transport",
    routing: "Where requests go",
    routings: { auto: "to the replica that answers first", backlog: "to the least busy replica", off: "in turn" },
    queue: "Requests that may wait",
    queueDefault: "100",
    queueWrong: (most) => `Enter a whole number from 0 to ${most}.`,
    needsVllm: "Only the vLLM engine can share: select it, or switch sharing off.",
    needsReplica: "First enter the number of replicas: a whole number, 1 or more.",
    needsOneWorker: "A replica on several workers cannot share: set the worker count to 1.",
    excluded: (names) => `Cannot be combined with ${names}: remove it from the additional parameters.`,
    menu: "KV Cache Sharing",
  },
  zh: {
    title: "副本之间共享 KV 缓存（Xavier）",
    hint: "其他副本已经算过的前缀直接复制过来，不再重新计算。",
    alone: "只有一个副本时没有共享对象：再添加一个副本后自动开始共享。",
    options: "共享选项",
    pool: "每个副本的缓存池大小",
    poolDefault: "空闲内存的十分之一",
    poolWrong: "请填写字节数，或 4GiB、512MiB 这样的大小。",
    transport: "传输方式",
    routing: "请求的去向",
    routings: { auto: "最先回答的副本", backlog: "最空闲的副本", off: "轮流" },
    queue: "可等待的请求数",
    queueDefault: "100",
    queueWrong: (most) => `请填写 0 到 ${most} 的整数。`,
    needsVllm: "只有 vLLM 引擎可以共享：请选择 vLLM，或关闭共享。",
    needsReplica: "请先填写副本数：不小于 1 的整数。",
    needsOneWorker: "跨多个 worker 的副本无法共享：请把 worker 数量设为 1。",
    excluded: (names) => `不能与 ${names} 同时使用：请从附加参数中删除。`,
    menu: "KV 缓存共享",
  },
};

function words() {
  return document.documentElement.lang.toLowerCase().startsWith("zh") ? WORDS.zh : WORDS.en;
}
