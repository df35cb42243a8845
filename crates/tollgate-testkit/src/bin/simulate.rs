fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    if args.len() == 1 {
        let r = tollgate_testkit::simulation::tell(args[0]);
        for l in &r.timeline {
            println!("{l}");
        }
        println!("{:?}", r.violations);
        return;
    }
    let mut by: std::collections::BTreeMap<String, (u64, u64)> = Default::default();
    for s in args[0]..args[1] {
        if std::env::var_os("V").is_some() {
            eprintln!("{s}");
        }
        let r = tollgate_testkit::simulation::play(s);
        if let Some(v) = r.violations.first() {
            let e = by
                .entry(format!(
                    "{} / {} / {}",
                    v.invariant.as_str(),
                    r.trouble.as_str(),
                    r.consistency.as_str()
                ))
                .or_insert((0, s));
            if e.0 == 0 {
                println!("{s} {} {} {v:?} n={}", r.trouble.as_str(), r.consistency.as_str(), r.events);
            }
            e.0 += 1;
        }
    }
    println!("{by:#?}");
}
