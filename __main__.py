from minimind_hf.cli import main

main()
