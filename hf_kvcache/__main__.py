"""`python -m hf_kvcache` is `hf-kvcache`."""

from hf_kvcache.cli import main

if __name__ == "__main__":
    main()
