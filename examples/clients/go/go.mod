module example.com/tollgate-client

go 1.19
